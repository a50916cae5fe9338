"""Reads weights from safetensors files to wherever they are wanted.

They are read, not mapped: the end of a file that was cut short is then an error like any other, and
what the system keeps of files in memory is not counted to the process.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvlite.errors import ModelError
from kvlite.model.files import Stored

SCRATCH = (
    1 << 16
)  # more than that torch would convert in several threads, which wait for each other
STAGE = 1 << 26


class Stage(Protocol):
    """Host memory through which numbers reach a tensor."""

    def pieces(self, into: Tensor) -> Iterator[Tensor]:
        """One after the other, parts that make up flat `into`, each to be filled before the next
        is asked for."""
        ...


class Direct:
    """For a tensor in host memory: that is it."""

    def pieces(self, into: Tensor) -> Iterator[Tensor]:
        """All of it at once."""
        yield into


class Pinned:
    """For a tensor on a GPU: two pieces of pinned memory in turn, each filled while the other is
    copied from."""

    def __init__(self) -> None:
        self.memory = [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)]
        self.turn = 0

    def pieces(self, into: Tensor) -> Iterator[Tensor]:
        """As many as it takes; copies go to the current stream."""
        size = STAGE // into.dtype.itemsize
        for part in into.split(size):
            turn = self.turn = 1 - self.turn
            self.copied[turn].synchronize()
            piece = self.memory[turn].view(into.dtype)[: len(part)]
            yield piece
            part.copy_(piece, non_blocking=True)
            self.copied[turn].record()


class FileReader:
    """Reads from files that are kept open, so that they may be removed while it does. Not for
    several threads at once."""

    def __init__(self, paths: Iterable[Path], device: torch.device) -> None:
        """Open every file.

        Args:
            device: where tensors are that are read into.
        """
        self.stage: Stage = Pinned() if device.type == "cuda" else Direct()
        self.files = {path: path.open("rb", buffering=0) for path in set(paths)}
        self.states = {path: _state(file) for path, file in self.files.items()}
        self.scratch = torch.empty(SCRATCH, dtype=torch.uint8)

    def read(self, parts: Sequence[Stored], into: Tensor) -> None:
        """Fill `into`, which is flat, with parts one after the other, in its own type.

        Raises:
            ModelError: a file is no longer what it was, or cannot be read.
        """
        ends = [part.count for part in parts]
        for part, own in zip(parts, into.split(ends), strict=True):
            at = part.begin
            for piece in self.stage.pieces(own):
                at = self._fill(part, at, piece)

    def close(self) -> None:
        """Close every file."""
        for file in self.files.values():
            file.close()

    def require_unchanged(self) -> None:
        """Raises ModelError if a file was written to or cut short since it was opened."""
        for path, file in self.files.items():
            if _state(file) != self.states[path]:
                raise ModelError(
                    f"{path} was changed while weights were read from it (--stream disk): load the "
                    "model again"
                )

    def _fill(self, part: Stored, at: int, piece: Tensor) -> int:
        """Numbers from byte `at` on; the byte after them."""
        dtype = part.dtype
        assert dtype is not None
        if piece.dtype == dtype:
            return self._read(part.path, at, piece)
        for some in piece.split(SCRATCH // dtype.itemsize):
            raw = self.scratch.view(dtype)[: len(some)]
            at = self._read(part.path, at, raw)
            some.copy_(raw)
        return at

    def _read(self, path: Path, at: int, into: Tensor) -> int:
        left, file = into.view(torch.uint8).numpy().data, self.files[path]
        try:
            file.seek(at)
            while left:
                count = file.readinto(left)
                if not count:
                    raise OSError("it has come to its end")
                left, at = left[count:], at + count
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read from any more ({error.strerror or error}), as --stream "
                "disk has to: load the model again"
            ) from error
        return at


def _state(file: FileIO) -> tuple[int, int]:
    state = os.fstat(file.fileno())
    return state.st_size, state.st_mtime_ns
