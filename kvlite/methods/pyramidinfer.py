"""PyramidInfer: fewer tokens from layer to layer, so fewer keys and values are ever made."""

from dataclasses import dataclass
from functools import cached_property
from math import cos, pi
from typing import Literal

from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Needs, Prefilling, TokenPruning
from kvlite.methods.select import attended_tokens
from kvlite.methods.types import Selection, Tensor


@dataclass(frozen=True)
class PyramidInfer(Method):
    """After each layer, drops the tokens that the recent ones attend to least: later layers compute
    nothing for them, and hold no entries for them.

    The schedules are those of the official code. The ratio decides what is kept; the budget only
    decides which prompts are left whole. The official code also drops tokens of the answer; kvlite
    keeps them.

    Attributes:
        ratio: part of a layer's older tokens that go on, in the last layer ("cosine", falling
            from 1) or in each ("constant").
        schedule: how the ratio falls.
        recent: part of the tokens read that counts as recent: they score the others and always go
            on.
        sinks: first tokens, which always go on.
        least: number of older tokens below which no more are dropped.
        weight: how much more the last recent token's scores count than the first's.
    """

    name = "pyramidinfer"
    summary = "drops tokens from layer to layer; reads faster"
    paper = (
        "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference, section 4"
    )

    ratio: float = 0.9
    schedule: Literal["cosine", "constant"] = "cosine"
    recent: float = 0.2
    sinks: int = 4
    least: int = 64
    weight: float = 1.2

    at_least = {"sinks": 0}
    respects_budget = False  # the ratio decides

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("ratio", 0 < self.ratio <= 1, "above 0, at most 1")
        self.require("recent", 0 <= self.recent <= 1, "from 0 to 1")
        self.require("least", self.least >= self.sinks, "as many as sinks, or more")
        self.require("weight", self.weight > 0, "above 0")

    @cached_property
    def prefilling(self) -> Prefilling:
        return Prefilling(pruning=TokenPruning(self.token_budgets, self.prune_tokens))

    @cached_property
    def needs(self) -> Needs:
        return Needs(queries=self._recent, attention=True)

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        return [seen] * layers

    def _recent(self, budget: int) -> int:
        return int(self.recent * budget) + 1

    def token_budgets(self, layers: int, new: int, seen: int) -> list[int]:
        """Recent tokens, and what is left of the others."""
        recent = self._recent(seen)
        older = max(0, new - recent)
        budgets = []
        for layer in range(layers):
            budgets.append(new if older + recent >= new else older + recent)
            thinned = int(older * self._share(layer, layers))
            older = thinned if thinned > self.least else older
        return budgets

    def _share(self, layer: int, layers: int) -> float:
        if self.schedule == "constant":
            return self.ratio
        return self.ratio + (1 - self.ratio) * (cos(pi * layer / layers) + 1) / 2

    def prune_tokens(self, view: LayerView, through: int, width: int) -> Tensor:
        """The recent tokens, and those they look at most; later rows weigh more."""
        import torch

        rows = view.window.queries.shape[2]
        weights = torch.linspace(1, self.weight, rows, device=view.window.place)
        return attended_tokens(view, through, width, self.sinks, weights)

    def select(self, view: LayerView) -> list[Selection]:
        return view.keep_all()
