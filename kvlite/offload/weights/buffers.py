"""Memory for the weights of streamed layers: its layout, and filling it from the model's files or
from host memory.

Files are read, not mapped: a truncated file is then an ordinary error, and the system's page cache
is not counted as the process's memory.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from kvlite.errors import ModelError
from kvlite.model.files import Stored

ALIGNED = 256
# Larger conversions torch would split among threads, which wait for each other.
SCRATCH = 1 << 16
STAGE = 1 << 26
# Some systems only pin little at once.
PIECE = 1 << 27


@dataclass(frozen=True)
class Place:
    """A parameter's part of a layer's memory.

    Attributes:
        name: within the layer.
        parameter: its data is in that memory while the layer is on the device, else empty.
        shape, dtype: of the data.
        begin: the first byte.
        nothing: the empty data, on the device.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    begin: int
    nothing: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return prod(self.shape) * self.dtype.itemsize

    def within(self, memory: Tensor) -> Tensor:
        """Its part of flat uint8 memory, in its own shape and dtype."""
        part = memory[self.begin : self.begin + self.nbytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """All parameters of a layer, one after the other.

    Attributes:
        size: bytes from the first to the last, gaps included.
    """

    places: list[Place]
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return sum(place.nbytes for place in self.places)

    def bind(self, memory: Tensor) -> None:
        """Let the layer run from memory that holds its weights."""
        for place in self.places:
            place.parameter.data = place.within(memory)

    def release(self) -> None:
        """Empty the layer's parameters, so that using it fails instead of computing with
        another's."""
        for place in self.places:
            place.parameter.data = place.nothing


def lay_out(layer: nn.Module, device: torch.device) -> Layout:
    """A place for each parameter of a layer. Meta parameters become empty ones on the device;
    others keep their data until the layout releases them."""
    places: list[Place] = []
    for name, parameter in list(layer.named_parameters()):
        shape, dtype = parameter.shape, parameter.dtype
        nothing = torch.empty(0, dtype=dtype, device=device)
        if parameter.is_meta:
            parameter = nn.Parameter(nothing, requires_grad=False)
            owner, _, own = name.rpartition(".")
            setattr(layer.get_submodule(owner), own, parameter)
        places.append(Place(name, parameter, shape, dtype, 0, nothing))
    return laid_out(places)


def laid_out(places: Iterable[Place]) -> Layout:
    """Places one after the other."""
    made: list[Place] = []
    end = 0
    for place in places:
        made.append(replace(place, begin=end))
        end += -(-place.nbytes // ALIGNED) * ALIGNED
    return Layout(made, end)


Stage = Callable[[Tensor], Iterator[Tensor]]
"""Yields host memory for the parts of a flat tensor in turn, each to be filled before the next."""


def stage_for(device: torch.device) -> Stage:
    """Through pinned memory for a GPU; a tensor in host memory is filled directly, at once."""
    return _Pinned().pieces if device.type == "cuda" else lambda into: iter((into,))


class _Pinned:
    """Two pieces of pinned memory in turn: one is filled while the other is copied from."""

    def __init__(self) -> None:
        self.memory = [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)]
        self.turn = 0

    def pieces(self, into: Tensor) -> Iterator[Tensor]:
        """Pieces that cover all of `into`; copies go to the current stream."""
        size = STAGE // into.dtype.itemsize
        for part in into.split(size):
            turn = self.turn = 1 - self.turn
            self.copied[turn].synchronize()
            piece = self.memory[turn].view(into.dtype)[: len(part)]
            yield piece
            part.copy_(piece, non_blocking=True)
            self.copied[turn].record(torch.cuda.current_stream(into.device))


class FileReader:
    """Reads from files that are kept open, so that they may be deleted in the meantime. Not
    thread-safe."""

    def __init__(self, parts: Iterable[Stored], device: torch.device) -> None:
        """Open every file that has one of the parts, to read into tensors on `device`."""
        self.stage = stage_for(device)
        paths = {part.path for part in parts}
        self.files = {path: path.open("rb", buffering=0) for path in paths}
        self.states = {path: _state(file) for path, file in self.files.items()}
        self.scratch = torch.empty(SCRATCH, dtype=torch.uint8)

    def read(self, parts: Sequence[Stored], into: Tensor) -> None:
        """Fill the flat tensor `into` with parts one after the other, converted to its dtype.
        Raises ModelError if a file was changed, or cannot be read."""
        ends = [part.count for part in parts]
        for part, own in zip(parts, into.split(ends), strict=True):
            at = part.begin
            for piece in self.stage(own):
                at = self._fill(part, at, piece)

    def close(self) -> None:
        """Close every file."""
        for file in self.files.values():
            file.close()

    def require_unchanged(self) -> None:
        """Raise ModelError if a file was written to or truncated since it was opened."""
        for path, file in self.files.items():
            if _state(file) != self.states[path]:
                raise ModelError(
                    f"{path} was changed while weights were read from it (--stream disk): load the "
                    "model again"
                )

    def _fill(self, part: Stored, at: int, piece: Tensor) -> int:
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
    """Weights that stay in safetensors files: for each layer, its places and their stored parts."""

    def __init__(
        self, layers: Sequence[Sequence[tuple[Place, list[Stored]]]], device: torch.device
    ) -> None:
        self.layers = layers
        every = (part for layer in layers for _, parts in layer for part in parts)
        self.reader = FileReader(every, device)

    def bring(self, index: int, memory: Tensor) -> None:
        """Read one layer. Raises ModelError if the files were changed."""
        for place, parts in self.layers[index]:
            self.reader.read(parts, place.within(memory).view(-1))
        self.reader.require_unchanged()


class InMemory:
    """Weights in host memory, each layer as `copied` or `taken` gives it."""

    def __init__(self, layers: Sequence[Sequence[Tensor]]) -> None:
        self.layers = layers

    def bring(self, index: int, memory: Tensor) -> None:
        """Copy one layer."""
        sizes = [len(piece) for piece in self.layers[index]]
        parts = memory[: sum(sizes)].split(sizes)
        for part, piece in zip(parts, self.layers[index], strict=True):
            part.copy_(piece, non_blocking=True)


def copied(layout: Layout) -> list[Tensor]:
    """A layer's weights in host memory, pinned if possible, in pieces that follow its layout."""
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for place in layout.places:
        place.within(flat).copy_(place.parameter.data)
    return [_pinned(piece) for piece in flat.split(PIECE)]


def taken(layout: Layout) -> list[Tensor]:
    """Like `copied`, but empties the parameters, too."""
    pieces = copied(layout)
    layout.release()
    return pieces


def pinned_pieces(stack: Tensor) -> list[Tensor]:
    """A copy of a stacked tensor in host memory, pinned if possible, in pieces of so many rows."""
    rows = max(1, PIECE // max(1, stack.nbytes // len(stack)))
    return [_pinned(piece) for piece in stack.cpu().split(rows)]


def _pinned(piece: Tensor) -> Tensor:
    # It is pageable if the system pins no more.
    try:
        return piece.pin_memory()
    except RuntimeError:
        return piece.clone()


def move_unstreamed(layer: nn.Module, device: torch.device) -> None:
    """Put buffers, and the scales that bitsandbytes keeps beside 4-bit weights, on the device for
    good."""
    for part in layer.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    for parameter in layer.parameters():
        scales = getattr(parameter, "quant_state", None)
        if scales is not None:
            scales.to(device)
