"""Tensors and a description in one file: written whole or not at all, each byte checked when read.

It is a safetensors file (https://github.com/huggingface/safetensors, "Format"), so other programs
can read it, and nothing in it can be executed. The header begins with its own checksum and has one
for each tensor. They are CRC-32, which is fast and enough against accidents. The `safetensors`
library maps what it reads and copies what it writes, so the format is written here.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from io import FileIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvlite.config.atomic_file import replacing
from kvlite.config.checked_file import from_json, sound
from kvlite.config.units import readable
from kvlite.engine.callbacks import Progress
from kvlite.errors import SnapshotError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvlite.offload.weights.buffers import Stage


# The format of whole conversations, and of light ones, which kvlite's first version did not know.
# Newer ones are refused.
WHOLE, LIGHT = 1, 2
FORMAT = LIGHT
LONGEST_HEADER = 100_000_000
# Large enough for disks, small enough to stay in a core's cache between reading and checking.
BLOCK = 1 << 20


# Each of torch's types: its name in the format, and its bytes.
_KINDS = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "bool": ("BOOL", 1),
}
_TYPES = {kind: (name, size) for name, (kind, size) in _KINDS.items()}
_BEGIN, _NO_SUM, _ALIGNED = b'{"__metadata__":{"crc32":"', "0" * 8, 64


class _Entry(NamedTuple):
    """A tensor in a file; `type` is torch's name, `begin` and `end` are offsets in the file."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: int


def write_tensors(
    path: Path,
    values: Mapping[str, Any],
    tensors: "Mapping[str, Tensor]",
    progress: Progress | None = None,
    most: int | None = None,
    form: int = WHOLE,
) -> int:
    """Write a file, or leave what was there; returns its bytes.

    Args:
        values: JSON values.
        tensors: on any device, in any layout; none is copied as a whole.
        progress: called with (bytes done, bytes in all).
        most: the largest size allowed, in bytes.
        form: the format's version.

    Raises:
        SnapshotError: it cannot be written there, or would be too large.
    """
    # The widest numbers first: then each tensor is aligned.
    order = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    empty = _header(values, order, [_NO_SUM] * len(order), form)
    total, done = len(empty) + sum(each.nbytes for each in order.values()), len(empty)
    if most is not None and total > most:
        raise SnapshotError(
            f"{path} would take {readable(total)}, and the limit is {readable(most)}: raise it "
            "with `kvlite library limit SIZE`, or name a file elsewhere"
        )
    with replacing(path, total) as file:
        file.write(empty)
        sums = []
        for tensor in order.values():
            checksum = 0
            for block in _blocks(tensor):
                file.write(block)
                checksum = zlib.crc32(block, checksum)
                done += len(block)
                if progress is not None:
                    progress(done, total)
            sums.append(f"{checksum:08x}")
        file.seek(0)
        file.write(_header(values, order, sums, form))
    return total


def _header(
    values: Mapping[str, Any], tensors: "Mapping[str, Tensor]", sums: list[str], form: int
) -> bytes:
    metadata = {
        "crc32": _NO_SUM,
        "format": str(form),
        "sums": "".join(sums),
        "kvlite": json.dumps(values),
    }
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        (kind, _), end = _KINDS[_type_of(tensor)], at + tensor.nbytes
        table[name] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return _summed(len(text).to_bytes(8, "little") + text)


def _summed(header: bytes) -> bytes:
    at = 8 + len(_BEGIN)
    blank = header[:at] + _NO_SUM.encode() + header[at + len(_NO_SUM) :]
    return blank[:at] + f"{zlib.crc32(blank):08x}".encode() + blank[at + len(_NO_SUM) :]


class TensorFile:
    """A file open for reading, which may be replaced or removed meanwhile.

    Attributes:
        values: the JSON values written with the tensors.
        progress: called with (bytes read, bytes in all).
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises SnapshotError if it is not such a file, damaged, or of
        a newer format."""
        self.path = path
        self.progress: Progress | None = None
        self.file = _opened(path)
        try:
            self.nbytes = os.fstat(self.file.fileno()).st_size
            self._begin, self.values, self._table = self._read_header()
        except BaseException:
            self.file.close()
            raise
        self._stages: dict[torch.device, Stage] = {}
        self._done = self._begin

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def damaged(self, what: str = "") -> SnapshotError:
        """The error that it is damaged; `what` adds details."""
        more = f" ({what})" if what else ""
        return SnapshotError(
            f"{self.path} is damaged or cut short{more}: use another copy of it, or make it again"
        )

    def size(self, prefix: str) -> int:
        """The bytes of all tensors whose names begin so."""
        found = (each for name, each in self._table.items() if name.startswith(prefix))
        return sum(each.end - each.begin for each in found)

    def new(self, name: str, device: "torch.device") -> "Tensor":
        """Read a tensor. Raises SnapshotError if it is missing or damaged."""
        import torch

        entry = self._entry(name)
        made = torch.empty(entry.shape, dtype=getattr(torch, entry.type), device=device)
        self.fill(name, made)
        return made

    def fill(self, name: str, into: "Tensor") -> None:
        """Read a tensor into another of its shape and type, in any layout; errors as of `new`."""
        from kvlite.offload.weights.buffers import stage_for

        entry = self._entry(name)
        if into.shape != entry.shape or _type_of(into) != entry.type:
            raise self.damaged(f"{name} has another size")
        device = into.device
        if device not in self._stages:
            self._stages[device] = stage_for(device)
        checksum = 0
        self.file.seek(entry.begin)
        for run in runs(into):
            for piece in self._stages[device](run):
                checksum = self._read(piece, checksum)
        if checksum != entry.checksum:
            raise self.damaged(name)

    def _read(self, piece: "Tensor", checksum: int) -> int:
        import torch

        left = piece.view(torch.uint8).numpy().data
        while left:
            try:
                count = self.file.readinto(left[:BLOCK])
            except OSError as error:
                raise self.damaged(error.strerror or str(error)) from error
            if not count:
                raise self.damaged()
            checksum = zlib.crc32(left[:count], checksum)
            left, self._done = left[count:], self._done + count
            if self.progress is not None:
                self.progress(self._done, self.nbytes)
        return checksum

    def _entry(self, name: str) -> _Entry:
        if name not in self._table:
            raise self.damaged(f"{name} is missing")
        return self._table[name]

    def _read_header(self) -> tuple[int, dict[str, Any], dict[str, _Entry]]:
        head = self._exactly(min(8 + len(_BEGIN), self.nbytes))
        if not head[8:] == _BEGIN[: len(head[8:])]:
            raise SnapshotError(
                f"{self.path} is not a kvlite snapshot: `kvlite read` makes one of a document"
            )
        length = int.from_bytes(head[:8], "little")
        begin = 8 + length
        if begin > self.nbytes or not len(_BEGIN) + 8 < length <= LONGEST_HEADER:
            raise self.damaged()
        header = head + self._exactly(begin - len(head))
        if _summed(header) != header:
            raise self.damaged("its header")
        with sound(lambda _: self.damaged("its header")):
            table = from_json(header[8:])
            metadata = table.pop("__metadata__")
            if int(metadata["format"]) > FORMAT:
                raise SnapshotError(
                    f"{self.path} was made by a newer kvlite (format {metadata['format']}, this "
                    f"one knows {FORMAT}): update kvlite to open it"
                )
            values = from_json(metadata["kvlite"])
            entries = self._entries(table, metadata["sums"], begin)
        return begin, values, entries

    def _entries(self, table: dict[str, Any], sums: str, begin: int) -> dict[str, _Entry]:
        entries, at = dict[str, _Entry](), begin
        for number, (name, plain) in enumerate(table.items()):
            (kind, itemsize), shape = _TYPES[plain["dtype"]], tuple(plain["shape"])
            first, last = (begin + int(each) for each in plain["data_offsets"])
            size = prod(shape) * itemsize
            if first != at or last - first != size or min(shape, default=0) < 0:
                raise ValueError(name)
            checksum = int(sums[8 * number : 8 * number + 8], 16)
            entries[name] = _Entry(kind, shape, first, last, checksum)
            at = last
        if at != self.nbytes:
            raise self.damaged(f"{self.nbytes:,} bytes instead of {at:,}")
        return entries

    def _exactly(self, count: int) -> bytes:
        data = self.file.read(count)
        while len(data) < count and (more := self.file.read(count - len(data))):
            data += more
        if len(data) != count:
            raise self.damaged()
        return data


def _opened(path: Path) -> FileIO:
    try:
        if path.is_dir():
            raise SnapshotError(f"{path} is a folder: name a .kv file")
        if path.exists() and not path.is_file():
            raise SnapshotError(f"{path} is a device or a pipe: name a .kv file")
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise SnapshotError(f"there is no file {path}: check the path") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SnapshotError(f"{path} cannot be read ({why}): check its permissions") from error


def _type_of(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def runs(tensor: "Tensor") -> "Iterator[Tensor]":
    """The contiguous parts of a tensor, flat, in order."""
    if tensor.is_contiguous():
        if tensor.numel():
            yield tensor.view(-1)
        return
    for part in tensor:
        yield from runs(part)


def _blocks(tensor: "Tensor") -> Iterator[memoryview]:
    import torch

    for run in runs(tensor):
        for part in run.split(max(1, BLOCK // run.element_size())):
            yield part.cpu().view(torch.uint8).numpy().data
