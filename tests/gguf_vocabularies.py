"""GGUF files that are nothing but a header."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFValueType, GGUFWriter

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


def write_header(path: Path, fields: Mapping[str, Any], architecture: str = "llama") -> Path:
    """A file with these fields; lists of no values are left out."""
    writer = GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_key_value(key, value, GGUFValueType.INT64)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named(**fields: Any) -> dict[str, Any]:
    """Fields of the tokenizer."""
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def pieces_of(*words: str, more: Sequence[tuple[str, int]] = ()) -> dict[str, Any]:
    """A SentencePiece vocabulary: three controls, bytes, `more` tokens with their types, and all
    beginnings of words, the short ones with better scores."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += more
    characters = dict.fromkeys("".join(words))
    parts = dict.fromkeys(word[:end] for end in range(2, 20) for word in words if len(word) >= end)
    tokens += [(piece, NORMAL) for piece in [*characters, *parts]]
    return named(
        model="llama",
        tokens=[token for token, _ in tokens],
        token_type=[kind for _, kind in tokens],
        scores=[-float(number) for number in range(len(tokens))],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )


def bytes_of(*words: str, more: Sequence[tuple[str, int]] = (), **fields: Any) -> dict[str, Any]:
    """A byte-level vocabulary with merges for all beginnings of words, in GPT-2's characters."""
    from kvlite.model.gguf.pre_tokenizers import BYTE_CHARACTERS

    tokens = [(character, NORMAL) for character in BYTE_CHARACTERS]
    merges = list[str]()
    for word in words:
        written = "".join(BYTE_CHARACTERS[byte] for byte in word.encode())
        for end in range(2, len(written) + 1):
            if (written[:end], NORMAL) not in tokens:
                tokens.append((written[:end], NORMAL))
                merges.append(f"{written[: end - 1]} {written[end - 1]}")
    tokens += [("<s>", CONTROL), ("<end>", CONTROL), *more]
    return named(
        model="gpt2",
        tokens=[token for token, _ in tokens],
        token_type=[kind for _, kind in tokens],
        merges=merges or ["a b"],
        eos_token_id=len(tokens) - 1 - len(more),
        bos_token_id=len(tokens) - 2 - len(more),
        **fields,
    )
