"""A method that only records what it is shown, to measure other methods on the same prefill."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kvlite.cache import Selection
from kvlite.methods import Method
from kvlite.methods.base import LayerView
from kvlite.methods.capabilities import Decoding, Needs, Prefilling, Reconstruction
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.shape import ModelShape


@dataclass(frozen=True)
class Probe(Method):
    """Looks on with as many queries as the hungriest of the methods wants."""

    name: ClassVar[str] = "watch"
    summary: ClassVar[str] = "measures other methods"
    paper: ClassVar[str] = "none"

    queries: int
    first: int = 0
    text: bool = False
    sums: bool = False
    reconstruction: Reconstruction | None = None

    @property
    def spec(self) -> str:
        """What its scores depend on: one with the same spec goes on from them."""
        return f"{self.name}:sums={self.sums},reconstruction={self.reconstruction}"

    @cached_property
    def prefilling(self) -> Prefilling:
        """Repeated, where one of them asks for it."""
        return Prefilling(reconstruction=self.reconstruction)

    @cached_property
    def decoding(self) -> Decoding:
        """One row where one of them sums or repeats."""
        rows = int(self.sums or self.reconstruction is not None)
        return Decoding(rows=rows, cumulative=self.sums)

    @property
    def needs_text(self) -> bool:
        """What was asked for."""
        return self.text

    @cached_property
    def needs(self) -> Needs:
        """What was asked for."""
        return Needs(self.queries, self.first)

    def select(self, view: LayerView) -> list[Selection]:
        """Never called: the branches cut."""
        raise AssertionError("watch does not select")


def probing(shape: ModelShape, probe: Probe) -> list[LayerPolicy]:
    """Policies that let a probe look on at every layer; of those with windows, where no method
    chooses, it keeps the queries alone."""
    return [
        LayerPolicy(probe if window is None else Probe(probe.queries), 0, window)
        for window in shape.windows
    ]
