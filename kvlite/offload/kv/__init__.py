"""The KV cache in host RAM and on disk: stored, searched, fetched back."""
