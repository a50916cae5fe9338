"""A GGUF file's header, read without trusting it.

Source: the GGUF specification (ggml's docs/gguf.md). The gguf package creates an object for every
value, as many as a file claims to have. Here counts and sizes are limited to those of language
models, and lists are skipped, so that a hostile header costs neither time nor memory.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any

from kvlite.errors import ModelError
from kvlite.model.config_limits import MOST
from kvlite.model.files import Stored

VERSIONS = (2, 3)
# The largest vocabularies have a quarter of a million tokens, with name, score, kind and merge.
_MOST_VALUES, _MOST_FIELDS, _MOST_TENSORS = 8 << 20, 1 << 16, 1 << 17
_LONGEST_TEXT, _MOST_DIMENSIONS = 64 << 20, 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_TEXT, _ARRAY = 8, 9
# Sizes, by their names in GGUF and in a config.json.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_NEEDED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
        architecture: GGUF's name for it.
        fields: the metadata; of a list only its length, as a tuple of one.
        tensors: by GGUF's names; their kinds are ggml's, such as Q4_K.
        order: of bytes, "<" or ">".
    """

    path: Path
    architecture: str
    fields: dict[str, Any]
    tensors: dict[str, Stored]
    order: str

    @property
    def numbers(self) -> int:
        """How many weights there are."""
        return sum(tensor.count for tensor in self.tensors.values())

    def require_sizes(self) -> None:
        """Raises ModelError unless sizes are plausible and the file has as many weights as they
        need: transformers would make up what is missing, however much that is."""
        try:
            wanted = sum(_parts(dict(self._sizes())))
            if wanted > 2 * self.numbers:
                raise _Damaged(f"its sizes are of {wanted:,} weights, and it has {self.numbers:,}")
        except _Damaged as error:
            raise _damaged(self.path, error) from None

    def _sizes(self) -> Iterator[tuple[str, int]]:
        for key in _NEEDED:
            if f"{self.architecture}.{key}" not in self.fields:
                raise _Damaged(f"there is no {self.architecture}.{key}")
        for key, name in _SIZES.items():
            value = self.fields.get(f"{self.architecture}.{key}")
            if value is None or (isinstance(value, tuple) and key not in _NEEDED):
                continue
            least = 0 if key.startswith("expert") else 1
            if type(value) is not int or not least <= value <= MOST[name]:
                raise _Damaged(f"{self.architecture}.{key} is {value!r}")
            yield key, value
        tokens = self.fields.get("tokenizer.ggml.tokens")
        if isinstance(tokens, tuple):
            yield "tokens", tokens[0]


class _Damaged(Exception):
    """The header contradicts the format, or itself."""


def read_header(path: Path) -> Header:
    """The header of a GGUF file.

    Raises:
        ModelError: it is no GGUF file, is cut short or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        require_magic(file, path)
        try:
            return _Reading(file, path).header()
        except (_Damaged, UnicodeDecodeError) as error:
            raise _damaged(path, error) from None


def require_magic(file: IO[bytes], path: Path) -> None:
    """Raises ModelError unless a file begins like a GGUF file."""
    if file.read(4) != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: its first bytes are not 'GGUF'")


def _damaged(path: Path, why: Exception) -> ModelError:
    return ModelError(f"{path} is truncated or damaged ({why}): download it again")


class _Reading:
    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file = file
        self.path = path
        self.size = path.stat().st_size
        self.order = "<"
        self.values = 0

    def header(self) -> Header:
        (version,) = self._numbers("I")
        if not version & 0xFFFF:
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "big"), "little")
        if version not in VERSIONS:
            raise _Damaged(f"version {version} of the format, not {VERSIONS[0]} or {VERSIONS[1]}")
        tensors, fields = self._numbers("QQ")
        if tensors > _MOST_TENSORS or fields > _MOST_FIELDS:
            raise _Damaged(f"{tensors:,} tensors and {fields:,} fields")
        about: dict[str, Any] = {}
        for _ in range(fields):
            key = self._text()
            if key in about:
                raise _Damaged(f"{key!r} is there twice")
            about[key] = self._value(*self._numbers("I"))
        if about.get("split.count", 1) not in (0, 1):
            raise ModelError(
                f"{self.path} is one of {about['split.count']} parts of a model: merge them first, "
                "for example with `llama-gguf-split --merge`"
            )
        if not tensors:
            raise _Damaged("no tensors")
        found = self._weights(tensors, about.get("general.alignment", 32))
        architecture = about.get("general.architecture")
        if not isinstance(architecture, str):
            raise _Damaged("general.architecture is no text")
        return Header(self.path, architecture, about, found, self.order)

    def _weights(self, count: int, alignment: Any) -> dict[str, Stored]:
        """Where tensors lie; checks that each lies within the file."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kinds = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment is {alignment!r}")
        found: dict[str, Stored] = {}
        for _ in range(count):
            name = self._text()
            if name in found:
                raise _Damaged(f"{name!r} is there twice")
            (dimensions,) = self._numbers("I")
            if not 0 < dimensions <= _MOST_DIMENSIONS:
                raise _Damaged(f"{name!r} has {dimensions:,} dimensions")
            sizes = self._numbers(f"{dimensions}Q")
            kind, begin = self._numbers("IQ")
            if kind not in kinds:
                raise _Damaged(f"{name!r} is of type {kind}")
            called, block, nbytes = kinds[kind]
            if not prod(sizes) or sizes[0] % block or begin % alignment:
                raise _Damaged(f"{name!r} has sizes {sizes} at {begin}")
            end = begin + prod(sizes) // block * nbytes
            found[name] = Stored(self.path, called, sizes[::-1], begin, end)
        data = -(-self.file.tell() // alignment) * alignment
        last = data + max(tensor.end for tensor in found.values())
        if last > self.size:
            raise _Damaged(f"{last:,} bytes were written, {self.size:,} are here")
        return {
            name: replace(each, begin=data + each.begin, end=data + each.end)
            for name, each in found.items()
        }

    def _value(self, kind: int) -> Any:
        """A field's value; of an array only its length, as a tuple of one."""
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise _Damaged(f"a value of type {kind}")
        inner, count = self._numbers("IQ")
        self.values += count
        if self.values > _MOST_VALUES:
            raise _Damaged(f"a list of {count:,} values")
        if inner in _SCALARS:
            self._skip(count * struct.calcsize("=" + _SCALARS[inner]))
        elif inner == _TEXT:
            for _ in range(count):
                self._skip(*self._numbers("Q"))
        else:
            raise _Damaged(f"a list of type {inner}")
        return (count,)

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        if length > _LONGEST_TEXT:
            raise _Damaged(f"a text of {length:,} bytes")
        return self._bytes(length).decode()

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        kinds = self.order + kinds
        return struct.unpack(kinds, self._bytes(struct.calcsize(kinds)))

    def _bytes(self, count: int) -> bytes:
        found = self.file.read(count) if count <= self.size else b""
        if len(found) != count:
            raise _Damaged("it ends in the middle of its header")
        return found

    def _skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise _Damaged("it ends in the middle of its header")
        self.file.seek(count, 1)


def _parts(sizes: dict[str, int]) -> Iterator[int]:
    """Numbers of weights that a model of these sizes has at least."""
    hidden, layers = sizes["embedding_length"], sizes["block_count"]
    heads = sizes["attention.head_count"]
    dim = sizes.get("attention.key_length", sizes.get("rope.dimension_count", hidden // heads))
    yield max(sizes.get("vocab_size", 0), sizes.get("tokens", 0)) * hidden
    yield layers * hidden * 2 * dim * (heads + sizes.get("attention.head_count_kv", 0))
    experts = sizes.get("expert_count", 0)
    inner = sizes.get("expert_feed_forward_length", sizes["feed_forward_length"])
    yield layers * hidden * 3 * inner * max(1, experts)
