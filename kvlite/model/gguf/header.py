"""A GGUF file's header, read without trusting it.

Source: the GGUF specification (ggml's docs/gguf.md). The gguf package creates an object for every
value, as many as a file claims to have, which takes seconds for a vocabulary. Here counts and sizes
are limited to those of language models, and long lists stay where they are until they are asked
for.
"""

import hashlib
import re
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any

from kvlite.errors import ModelError
from kvlite.model.files import Stored, add_samples

VERSIONS = (2, 3)
# The largest vocabularies have a quarter of a million tokens, with name, score, kind and merge.
_MOST_VALUES, _MOST_FIELDS, _MOST_TENSORS, _MOST_PARTS = 8 << 20, 1 << 16, 1 << 17, 1 << 12
_LONGEST_TEXT, _MOST_DIMENSIONS = 64 << 20, 4
# Lists up to this length, such as sizes by layer, are read at once.
_SHORT = 1 << 11
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_OLLAMAS_MXFP4 = 4
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class Later:
    """A long list that was not read yet.

    Attributes:
        kind: GGUF's number of its values' type.
        count: how many there are.
        begin: where they begin in the file.
    """

    kind: int
    count: int
    begin: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file, or of the files that a model is split into.

    Attributes:
        paths: the files, in order; metadata is in the first.
        architecture: GGUF's name for it.
        fields: the metadata; short lists as tuples, long ones as `Later`.
        tensors: by GGUF's names; their kinds are ggml's, such as Q4_K.
        digest: of its bytes and of samples of the weights, in 16 digits: which model it is.
    """

    paths: tuple[Path, ...]
    architecture: str
    fields: dict[str, Any]
    tensors: dict[str, Stored]
    digest: str

    def values(self, key: str) -> list[Any] | None:
        """A list of the metadata, whole; None if there is no list of this name."""
        found = self.fields.get(key)
        if isinstance(found, tuple):
            return [*found]
        if not isinstance(found, Later):
            return None
        with self.paths[0].open("rb") as file:
            return _Reading(file, self.paths[0], found.begin).values(found.kind, found.count)


def read_header(path: Path) -> Header:
    """The header of a GGUF file; of a part of a split model, that of the whole model. Raises
    ModelError if it is no GGUF file, is cut short or damaged, or a part is missing; OSError if it
    cannot be read."""
    first = _first_part(path)
    fields, tensors, digest = _read_part(first)
    paths = [first]
    for part in _further_parts(first, fields):
        own, more, sum_ = _read_part(part)
        if own.get("split.no") != len(paths):
            raise _damaged(part, f"it is part {own.get('split.no')}, not {len(paths)}")
        if double := tensors.keys() & more.keys():
            raise _damaged(part, f"{min(double)!r} is in another part, too")
        tensors |= more
        digest += sum_
        paths.append(part)
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise _damaged(first, "general.architecture is no text")
    wanted = fields.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise _damaged(first, f"{wanted} tensors were written, {len(tensors)} are here")
    whole = digest if len(paths) == 1 else hashlib.sha256(digest.encode()).hexdigest()[:16]
    return Header(tuple(paths), architecture, fields, tensors, whole)


def names_model(path: Path) -> bool:
    """Whether a GGUF file's name is one to call a model by: neither that of an image encoder beside
    a model, nor that of a later one of several parts."""
    named = _PART.fullmatch(path.name)
    is_later = named is not None and int(named[2]) > 1
    return not is_later and "mmproj" not in path.name.lower()


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is truncated or damaged ({why}): download it again")


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, Stored], str]:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: its first bytes are not 'GGUF'")
        return _Reading(file, path, 4).part()


def _first_part(path: Path) -> Path:
    named = _PART.fullmatch(path.name)
    if named is None or int(named[2]) == 1:
        return path
    first = path.with_name(f"{named[1]}-00001-of-{named[3]}.gguf")
    if not first.is_file():
        raise ModelError(f"{first} is missing, the first part of this model: put it beside {path}")
    return first


def _further_parts(first: Path, fields: dict[str, Any]) -> list[Path]:
    count = fields.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= _MOST_PARTS:
        raise _damaged(first, f"split.count is {count!r}")
    if count < 2:
        return []
    named = _PART.fullmatch(first.name)
    if named is None or int(named[3]) != count:
        raise ModelError(
            f"{first} is one of {count} parts of a model, which llama.cpp finds by their names: "
            f"call them NAME-00001-of-{count:05}.gguf and so on"
        )
    parts = [
        first.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf")
        for number in range(2, count + 1)
    ]
    if missing := [part for part in parts if not part.is_file()]:
        raise ModelError(
            f"{missing[0]} is missing, one of {count} parts of this model: put it beside {first}"
        )
    return parts


class _Reading:
    BLOCK = 1 << 20

    def __init__(self, file: IO[bytes], path: Path, begin: int) -> None:
        self.file, self.path = file, path
        self.size = path.stat().st_size
        self.count = 0
        self.digest: Any = hashlib.sha256()
        file.seek(begin)
        self.block, self.at, self.end = b"", 0, begin

    def part(self) -> tuple[dict[str, Any], dict[str, Stored], str]:
        (version,) = self._numbers("I")
        if not version & 0xFFFF:
            raise ModelError(
                f"{self.path} is big-endian, for machines that kvlite does not run on: get the "
                "usual little-endian file"
            )
        if version not in VERSIONS:
            raise self._wrong(f"version {version} of the format, not 2 or 3")
        tensors, fields = self._numbers("QQ")
        if tensors > _MOST_TENSORS or fields > _MOST_FIELDS:
            raise self._wrong(f"{tensors:,} tensors and {fields:,} fields")
        about: dict[str, Any] = {}
        for _ in range(fields):
            key = self._text()
            if key in about:
                raise self._wrong(f"{key!r} is there twice")
            about[key] = self._value(*self._numbers("I"))
        is_ollamas = about.get("general.architecture") == "gptoss"
        found = self._tensors(tensors, about.get("general.alignment", 32), is_ollamas)
        return about, found, self._sampled(min((t.begin for t in found.values()), default=0))

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == _TEXT:
            return [self._text() for _ in range(count)]
        return [*self._numbers(f"{count}{_SCALARS[kind]}")]

    def _sampled(self, begin: int) -> str:
        self.digest.update(self.block[: self.at])
        self.digest.update(self.size.to_bytes(8, "little"))
        add_samples(self.digest, self.file, begin)
        return str(self.digest.hexdigest()[:16])

    def _tensors(self, count: int, alignment: Any, is_ollamas: bool) -> dict[str, Stored]:
        """Where tensors lie; checks that each lies within the file. Ollama's own files have a
        number of their own for MXFP4."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kinds = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
        if is_ollamas:
            kinds[_OLLAMAS_MXFP4] = kinds[int(GGMLQuantizationType.MXFP4)]
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment is {alignment!r}")
        found: dict[str, Stored] = {}
        for _ in range(count):
            name = self._text()
            if name in found:
                raise self._wrong(f"{name!r} is there twice")
            (dimensions,) = self._numbers("I")
            if not 0 < dimensions <= _MOST_DIMENSIONS:
                raise self._wrong(f"{name!r} has {dimensions:,} dimensions")
            sizes = self._numbers(f"{dimensions}Q")
            kind, begin = self._numbers("IQ")
            if kind not in kinds:
                raise ModelError(
                    f"{self.path}: the weights {name!r} are of type {kind}, which llama.cpp does "
                    "not have (ik_llama.cpp and others have types of their own): get a file of "
                    "another quantization, such as Q4_K_M"
                )
            called, block, nbytes = kinds[kind]
            if not prod(sizes) or sizes[0] % block or begin % alignment:
                raise self._wrong(f"{name!r} has sizes {sizes} at {begin}")
            end = begin + prod(sizes) // block * nbytes
            found[name] = Stored(self.path, called, sizes[::-1], begin, end)
        data = -(-(self.end - len(self.block) + self.at) // alignment) * alignment
        last = data + max((tensor.end for tensor in found.values()), default=-data)
        if last > self.size:
            raise self._wrong(f"{last:,} bytes were written, {self.size:,} are here")
        self._require_filled(found, alignment, self.size - data)
        return {
            name: replace(each, begin=data + each.begin, end=data + each.end)
            for name, each in found.items()
        }

    def _require_filled(self, tensors: dict[str, Stored], alignment: int, size: int) -> None:
        """Tensors fill a file's `size` bytes of data, each of them from where the one before it
        ends, as ggml writes and demands: else one has another type or place."""
        before, at = "the header", 0
        for name, each in sorted(tensors.items(), key=lambda item: item[1].begin):
            if each.begin != at:
                fault = "overlaps" if each.begin < at else "does not follow"
                raise self._wrong(
                    f"{name!r} of type {each.kind} {fault} {before}, which ends at {at:,}"
                )
            before, at = repr(name), -(-each.end // alignment) * alignment
        if tensors and size >= at + alignment:
            raise self._wrong(f"{size - at:,} bytes follow {before}, the last tensor")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise self._wrong(f"a value of type {kind}")
        inner, count = self._numbers("IQ")
        self.count += count
        if self.count > _MOST_VALUES:
            raise self._wrong(f"a list of {count:,} values")
        if inner not in _SCALARS and inner != _TEXT:
            raise self._wrong(f"a list of type {inner}")
        if count <= _SHORT:
            return tuple(self.values(inner, count))
        later = Later(inner, count, self.end - len(self.block) + self.at)
        if inner == _TEXT:
            self._skip_texts(count)
        else:
            self._bytes(count * struct.calcsize("=" + _SCALARS[inner]))
        return later

    def _skip_texts(self, count: int) -> None:
        block, at, size = self.block, self.at, len(self.block)
        for _ in range(count):
            if at + 8 <= size:
                (length,) = _LENGTH.unpack_from(block, at)
                if at + 8 + length <= size:
                    at += 8 + length
                    continue
            self.at = at
            self._text()
            block, at, size = self.block, self.at, len(self.block)
        self.at = at

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        if length > _LONGEST_TEXT:
            raise self._wrong(f"a text of {length:,} bytes")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError as error:
            raise self._wrong(str(error)) from None

    def _wrong(self, why: str) -> ModelError:
        return _damaged(self.path, why)

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        kinds = "<" + kinds
        return struct.unpack(kinds, self._bytes(struct.calcsize(kinds)))

    def _bytes(self, count: int) -> bytes:
        if self.at + count > len(self.block):
            self._fill(count)
        found = self.block[self.at : self.at + count]
        if len(found) != count:
            raise self._wrong("it ends in the middle of its header")
        self.at += count
        return found

    def _fill(self, count: int) -> None:
        self.digest.update(self.block[: self.at])
        rest = self.block[self.at :]
        wanted = max(0, min(max(count, self.BLOCK), self.size) - len(rest))
        more = self.file.read(wanted)
        self.end += len(more)
        self.block, self.at = rest + more, 0
