"""Where weights that come to the device are kept: in a model's files, or in host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvlite.model.files import Stored
from kvlite.offload.weights.files import FileReader
from kvlite.offload.weights.slots import Layout, Place

PIECE = 1 << 27  # some systems pin no more than a little at once


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
