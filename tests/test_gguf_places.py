"""GGUF files whose tensors lie elsewhere than they say, or are of another type: refused by name."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from kvlite.errors import ModelError
from kvlite.model.gguf.header import read_header
from kvlite.model.gguf.vocabulary import Vocabulary
from tests.gguf_files import write_gguf

Bend = Callable[[bytearray, dict[str, int]], str]


def places(file: Path) -> dict[str, int]:
    """Where the header has each tensor's kind, which its offset follows."""
    data, found = file.read_bytes(), dict[str, int]()
    for each in gguf.GGUFReader(file).tensors:
        name = each.name.encode()
        at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
        (dimensions,) = struct.unpack_from("<I", data, at)
        found[each.name] = at + 4 + 8 * dimensions
    return found


def moved(to: int) -> Bend:
    def bend(data: bytearray, at: dict[str, int]) -> str:
        name = "blk.0.attn_q.weight"
        (offset,) = struct.unpack_from("<Q", data, at[name] + 4)
        struct.pack_into("<Q", data, at[name] + 4, max(0, offset + to))
        return ""

    return bend


def all_at_none(data: bytearray, at: dict[str, int]) -> str:
    for each in at.values():
        struct.pack_into("<Q", data, each + 4, 0)
    return "overlaps"


def swapped(data: bytearray, at: dict[str, int]) -> str:
    """Two of different sizes."""
    one, other = at["token_embd.weight"] + 4, at["blk.0.attn_q.weight"] + 4
    data[one : one + 8], data[other : other + 8] = data[other : other + 8], data[one : one + 8]
    return ""


def typed(name: str, kind: int) -> Bend:
    def bend(data: bytearray, at: dict[str, int]) -> str:
        struct.pack_into("<I", data, at[name], kind)
        return "follow"

    return bend


BENDS: list[Bend] = [
    all_at_none,
    swapped,
    moved(32),
    moved(1),
    moved(1 << 40),
    typed("blk.0.attn_q.weight", 1),
    typed("blk.0.ffn_up.weight", 8),
    typed("output_norm.weight", 30),
]


@pytest.mark.parametrize("bend", BENDS)
def test_tensors_fill_a_file(bend: Bend, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write_gguf(file)
    read_header(file)
    data = bytearray(file.read_bytes())
    said = bend(data, places(file))
    file.write_bytes(data)
    with pytest.raises(ModelError, match=rf"a\.gguf is truncated or damaged .*{said}"):
        read_header(file)


def test_bytes_that_no_tensor_has(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write_gguf(file)
    with file.open("ab") as more:
        more.write(bytes(31))
    read_header(file)
    with file.open("ab") as more:
        more.write(bytes(33))
    with pytest.raises(ModelError, match=r"follow .*, the last tensor"):
        read_header(file)


@pytest.mark.parametrize("role", ["bos", "eos", "eot", "eom", "unknown"])
def test_tokens_beyond_the_vocabulary(role: str, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write_gguf(file, fields={f"tokenizer.ggml.{role}_token_id": 8} if role != "eos" else {})
    if role == "eos":
        data = file.read_bytes()
        key = b"tokenizer.ggml.eos_token_id" + struct.pack("<II", 4, 0)
        file.write_bytes(data.replace(key, key[:-4] + struct.pack("<I", 8)))
    with pytest.raises(ModelError, match=f"{role}_token_id is 8, and there are 8 tokens"):
        Vocabulary.read(read_header(file))
