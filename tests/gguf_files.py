"""Small GGUF files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY = ["<|end|>", "a", "b", "c", "d", "\u0120", "ab", "cd"]
BLOCK = {
    "attn_norm": (32,),
    "ffn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_gate": (48, 32),
    "ffn_up": (48, 32),
    "ffn_down": (32, 48),
}


def write_gguf(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "llama",
    without: tuple[str, ...] = (),
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    packed: Mapping[str, tuple[str, Any]] | None = None,
    split: int = 0,
    order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> dict[str, Any]:
    """A Llama of one layer with eight tokens; returns its weights.

    Args:
        without: tensors, keys of the architecture, or the tokenizer, that are left out.
        fields: more of the metadata: numbers, texts, lists of numbers.
        tensors: more tensors, float32.
        packed: tensors in blocks, by ggml's names of types, `(rows, bytes of one)` uint8.
        split: tensors of a part, where the model is split.
    """
    file = gguf.GGUFWriter(path, architecture, split_max_tensors=split, endianess=order)
    sizes: dict[str, Any] = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "vocab_size": len(VOCABULARY),
    }
    stated = {f"{architecture}.{key}": value for key, value in sizes.items() if key not in without}
    for key, value in {**stated, **(fields or {})}.items():
        _add(file, key, value)
    if "tokenizer" not in without:
        file.add_tokenizer_model("gpt2")
        file.add_tokenizer_pre("smollm")
        file.add_token_list(VOCABULARY)
        file.add_token_types([3] + [1] * (len(VOCABULARY) - 1))
        file.add_token_merges(["a b", "c d"])
        file.add_eos_token_id(0)
    shapes = {"token_embd": (len(VOCABULARY), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in BLOCK.items()}
    generator = np.random.default_rng(seed)
    weights = {
        f"{name}.weight": generator.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
        if name not in without
    }
    for name, weight in {**weights, **(tensors or {})}.items():
        file.add_tensor(name, np.asarray(weight, np.float32))
    for name, (kind, blocks) in (packed or {}).items():
        file.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return weights


def _add(file: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        file.add_array(key, value)
        return
    kinds = gguf.GGUFValueType
    kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    file.add_key_value(key, value, kind[type(value)])
