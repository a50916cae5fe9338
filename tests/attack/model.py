"""The model that is attacked: tiny, random, and with the embedded model's tokenizer."""

import shutil
from pathlib import Path

import torch
import transformers

import kvlite
from tests.conftest import SIZES


def tiny_model(folder: Path, most: int = 8192) -> Path:
    """Its folder, as `tests.conftest.tiny_folder` makes it, for so many tokens."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {**SIZES, "vocab_size": 49_152, "tie_word_embeddings": True, "initializer_range": 0.3}
    sizes["max_position_embeddings"] = most
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    there = kvlite.load("smollm2-135m").model_path
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(there / name, folder)
    return folder
