"""GGUF files, read where they lie: their headers, configs, tokenizers and weights."""
