"""A model's decoder layers, as the engine accesses them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Passing:
    """The cost of layers whose weights are not all on the device.

    Attributes:
        setting: the value of `--stream`.
        nbytes: bytes of weights that each pass of a token through all layers brings to the device,
            at most: of experts, those that it is routed to may be there.
        bytes_per_s: the rate measured when the model was loaded.
    """

    setting: str
    nbytes: int
    bytes_per_s: float


class LayerGroup(nn.Module):
    """Layers of the model that run together as one of the engine's: one of them has keys and values
    of its own.

    It is called with tokens `(batch, L, hidden size)`, `kvlite`, which runs the attention, and
    `answers`: whether what comes out is wanted, as where layers are `trailing`; else queries, keys,
    values and states alone.

    Attributes:
        layers: in order, by their numbers in the model.
        trailing: whether layers behind that with attention keep a state after every token.
    """

    trailing = False

    def __init__(self, layers: Mapping[int, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})


class Layers:
    """The decoder layers in order, all on the device.

    In general a layer may only be used until the next one is accessed: `offload.StreamedLayers`
    brings weights to the device on access. The order of access matters to speed alone.

    Attributes:
        passing: the cost of a pass through streamed layers; None for these.
        for_steps: what does a layer's work for one token a sequence, once that is known.
    """

    passing: Passing | None = None
    for_steps: list[Callable[..., Tensor]] | None = None

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)

    def __len__(self) -> int:
        return len(self.modules)

    def __getitem__(self, index: int) -> Any:
        """The transformers module of one layer, ready to run."""
        return self.modules[index]

    def __iter__(self) -> Iterator[Any]:
        """Each layer in turn, ready to run."""
        return (self[index] for index in range(len(self)))

    @property
    def brought(self) -> int:
        """Bytes of weights that were brought to the device so far."""
        return 0

    def tensors(self) -> Iterator[Tensor]:
        """Tensors on the device besides the modules' own."""
        return iter(())
