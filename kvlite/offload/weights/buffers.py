"""Memory that layers' weights come to in turn: how they lie in it, and where they come from, the
model's files or host memory.

Files are read, not mapped: the end of one that was cut short is then an error like any other, and
what the system keeps of files in memory is not counted to the process.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from kvlite.errors import ModelError
from kvlite.model.files import Stored

ALIGNED = 256
# More than that torch would convert in several threads, which wait for each other.
SCRATCH = 1 << 16
STAGE = 1 << 26
# Some systems pin no more than a little at once.
PIECE = 1 << 27


@dataclass(frozen=True)
class Place:
    """A parameter's own part of such memory.

    Attributes:
        name: within the layer.
        parameter: has its numbers there while the layer is there, and none otherwise.
        shape, dtype: of its numbers.
        begin: the first byte.
        nothing: no numbers of this type, on the device.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    begin: int
    nothing: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * self.dtype.itemsize

    def within(self, memory: Tensor) -> Tensor:
        """Its part of flat uint8 memory, as it is shaped."""
        part = memory[self.begin : self.begin + self.nbytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """All parameters of a layer, one after the other.

    Attributes:
        places: theirs.
        size: bytes from the first to the last, gaps included.
    """

    places: list[Place]
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return sum(place.nbytes for place in self.places)

    def bind(self, memory: Tensor) -> None:
        """Let the layer run from memory that holds its numbers."""
        for place in self.places:
            place.parameter.data = place.within(memory)

    def release(self) -> None:
        """Take its numbers from the layer: it fails now where it would compute with another's."""
        for place in self.places:
            place.parameter.data = place.nothing


def lay_out(layer: nn.Module, device: torch.device) -> Layout:
    """A place for each parameter of a layer. Those without numbers are put on the device; others
    keep theirs until the layout releases them."""
    places: list[Place] = []
    end = 0
    for name, parameter in list(layer.named_parameters()):
        shape, dtype = parameter.shape, parameter.dtype
        nothing = torch.empty(0, dtype=dtype, device=device)
        if parameter.is_meta:
            parameter = nn.Parameter(nothing, requires_grad=False)
            owner, _, own = name.rpartition(".")
            setattr(layer.get_submodule(owner), own, parameter)
        places.append(Place(name, parameter, shape, dtype, end, nothing))
        end += -(-places[-1].nbytes // ALIGNED) * ALIGNED
    return Layout(places, end)


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


class InFiles:
    """Weights that stay in safetensors files."""

    def __init__(
        self, layers: Sequence[Sequence[tuple[Place, list[Stored]]]], device: torch.device
    ) -> None:
        """Open the files.

        Args:
            layers: every layer's places, and what each is made of.
        """
        self.layers = layers
        paths = {part.path for layer in layers for _, parts in layer for part in parts}
        self.reader = FileReader(paths, device)

    def bring(self, index: int, memory: Tensor) -> None:
        """Read one layer, in the type that is computed in.

        Raises:
            ModelError: the files are no longer what they were.
        """
        for place, parts in self.layers[index]:
            self.reader.read(parts, place.within(memory).view(-1))
        self.reader.require_unchanged()


class InMemory:
    """Weights in host memory, pinned where that can be had, as they will lie on the device."""

    def __init__(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Keep what there is.

        Args:
            layers: every layer's numbers, as `copied` or `taken` gives them.
        """
        self.layers = layers

    def bring(self, index: int, memory: Tensor) -> None:
        """Copy one layer."""
        sizes = [len(piece) for piece in self.layers[index]]
        parts = memory[: sum(sizes)].split(sizes)
        for part, piece in zip(parts, self.layers[index], strict=True):
            part.copy_(piece, non_blocking=True)


def copied(layout: Layout) -> list[Tensor]:
    """A layer's numbers in host memory, as they are laid out, in pieces one after the other."""
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for place in layout.places:
        place.within(flat).copy_(place.parameter.data)
    return [_pinned(piece) for piece in flat.split(PIECE)]


def taken(layout: Layout) -> list[Tensor]:
    """As `copied`; the parameters are left without."""
    pieces = copied(layout)
    layout.release()
    return pieces


def _pinned(piece: Tensor) -> Tensor:
    """A copy that a GPU can be given while it computes; one that it has to wait for, where the
    system has no more such memory."""
    try:
        return piece.pin_memory()
    except RuntimeError:
        return piece.clone()


def move_scales(layer: nn.Module, device: torch.device) -> None:
    """Put what bitsandbytes keeps beside 4-bit weights on the device, where it stays."""
    for parameter in layer.parameters():
        scales = getattr(parameter, "quant_state", None)
        if scales is not None:
            scales.to(device)
