"""A model's decoder layers, as the engine asks for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Passing:
    """What it takes that layers' weights are not all on the device.

    Attributes:
        setting: how `--stream` was written.
        nbytes: bytes of weights that a pass through all layers brings to the device.
        bytes_per_s: at which they came when the model was loaded.
    """

    setting: str
    nbytes: int
    bytes_per_s: float


class Layers:
    """The decoder layers in order. Each can run until another one is asked for: it may not be on
    the device for longer. These here are always; `offload.StreamedLayers` come when they are
    asked for. Which order they are asked for in only matters to speed.

    Attributes:
        passing: what a pass through layers that come and go takes; None for these.
        brought: bytes of weights that came to the device for layers that were asked for.
    """

    passing: Passing | None = None
    brought: int = 0

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)

    def __len__(self) -> int:
        return len(self.modules)

    def __getitem__(self, index: int) -> Any:
        """The transformers module of one layer, ready to run."""
        return self.modules[index]

    def __iter__(self) -> Iterator[Any]:
        """Every layer, ready to run in its turn."""
        return (self[index] for index in range(len(self)))

    def tensors(self) -> Iterator[Tensor]:
        """What is on the device for them beside the modules' own tensors."""
        return iter(())
