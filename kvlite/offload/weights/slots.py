"""Where a layer's weights lie in a flat piece of memory that several layers use in turn."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

ALIGNED = 256


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
