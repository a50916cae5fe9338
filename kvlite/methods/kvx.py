"""KV-X: a lambda mask of sinks and a recent window, and the top k of the middle, in every layer."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvlite.methods.allocation import BY_SCORES, LayerLine
from kvlite.methods.base import LayerView
from kvlite.methods.capabilities import Decoding, Needs
from kvlite.methods.scored import Observed
from kvlite.methods.scores import pool, top
from kvlite.methods.types import KVHeadGroup, Position, Selection, Tensor

_ALONE = "1 with middle=example and with per_layer"


@dataclass(frozen=True)
class KVX(Observed):
    """Keeps attention sinks and a recent window by position, and of the middle what gets the most
    attention; higher layers have smaller budgets. Entries are chosen while reading and at every
    decode step.

    The paper leaves open: the budgets of the first and the last layer (here PyramidKV's, which it
    follows), whether scores are per head (they are, unless `per_layer`), and what a layer is cut
    to. Of that it gives two readings:

    - middle="budget" (Eq. 6): a budget of C entries holds C/(2 omega) sinks, a recent window as
      large, and the best of the middle. While decoding, each new token evicts the weakest entry of
      the middle.
    - middle="example" (the example of section 4, and what Table 1's memory agrees with): of N
      entries N/(2 omega) sinks, recent ones and ones of the middle stay, whenever N exceeds the
      context limit.

    Attributes:
        omega: sinks and recent window together take 1/omega of the budget (2, 4, 8, 16, 32).
        middle: which reading.
        limit: with "example", entries a head must exceed to be cut; 0 for the budget.
        until_limit: with "example", cut repeatedly until a head is within the limit.
        alpha: observation window while reading, in queries; 0 for as many as the budget (the
            paper).
        decode: "evict", a new token costs an entry (the paper), or "grow", what was chosen while
            reading stays and the answer is added.
        recent: observation window while decoding, in queries.
        per_layer: one score for all heads of a layer.
    """

    name = "kvx"
    summary = "keeps first, latest and top-k tokens, also while answering"
    paper = (
        "KV-X: Optimizing Memory Efficiency in LLMs for Long-Sequence Inference, sections 3.1-3.3"
    )

    omega: int = 4
    middle: Literal["budget", "example"] = "budget"
    limit: int = 0
    until_limit: bool = False
    alpha: int = 0
    decode: Literal["evict", "grow"] = "evict"
    recent: int = 8
    per_layer: bool = False
    layers: LayerLine = "pyramid"

    at_least = {"omega": 1, "limit": 0, "alpha": 0}
    min_budget = 3  # a sink, a recent entry and a middle one

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "per_head",
            not self.per_head or (self.middle == "budget" and not self.per_layer),
            "false with middle=example and with per_layer",
        )
        example = self.middle == "example"
        self.require("groups", self.groups == 1 or not (example or self.per_layer), _ALONE)
        self.require(
            "layers", not (example and self.layers in BY_SCORES), "another with middle=example"
        )
        self.require("recent", 1 <= self.recent <= 1024, "from 1 to 1024")

    @property
    def heads_agree(self) -> bool:
        return self.per_layer

    @cached_property
    def needs(self) -> Needs:
        return Needs(queries=self.alpha or (lambda budget: budget), attention=True)

    @cached_property
    def decoding(self) -> Decoding:
        if self.decode == "grow":
            return Decoding()
        if self.middle == "budget":
            return Decoding(rows=self.recent, evict=self.evict)
        return Decoding(rows=self.recent, trim=self.trim)

    @property
    def respects_budget(self) -> bool:
        # In the "example" reading a head may keep more than its limit.
        return self.middle == "budget"

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """Lines on the arithmetic slope of Eq. 2; in the "example" reading the limit itself."""
        if self.middle == "example":
            return [self.limit or average] * layers
        return super().layer_budgets(layers, average, seen)

    def ends(self, budget: int) -> tuple[int, int]:
        """The lambda mask of a budget: sinks, and a recent window as large (Eq. 5)."""
        width = max(1, budget // (2 * self.omega))
        if self.middle == "budget":
            width = min(width, (budget - 1) // 2)
        return width, width

    def select(self, view: LayerView) -> list[Selection]:
        """Eq. 3 to 7."""
        if self.middle == "budget":
            return super().select(view)
        return view.keep(self._cut(scores, view.budget) for scores in self.scores(view))

    def evict(self, head_group: KVHeadGroup, budget: int, position: Position) -> Tensor:
        """The weakest entry between the sinks and the recent window, which has the newcomer."""
        import torch

        width, _ = self.ends(budget)
        scores = self.decode_scores(head_group, position)
        masked = (head_group.positions < width) | (head_group.positions > position - width)
        return scores.masked_fill(masked, torch.inf).argmin(-1)

    def trim(self, head_group: KVHeadGroup, budget: int) -> "Tensor | None":
        """The "example" reading's cut of a line that outgrew the limit."""
        if head_group.used <= budget:
            return None
        line = head_group.positions[..., : head_group.used]
        order, scores = line.argsort(-1), self.decode_scores(head_group, int(line.max()) + 1)
        return order.gather(-1, self._cut(scores.gather(-1, order), budget))

    def _cut(self, scores: Tensor, budget: int) -> Tensor:
        """The "example" reading's slots to keep of a line in order, by scores `(batch, heads,
        used)`."""
        import torch

        kept = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
        while kept.shape[-1] > budget:
            line = kept.shape[-1]
            width, _ = self.ends(line)
            if line < 3 * width + 1:
                break
            survivors = scores.gather(-1, kept)
            pooled = pool(survivors[..., width : line - width], self.pool, self.pooling)
            inner = top(pooled, width) + width
            kept = torch.cat(
                [kept[..., :width], kept.gather(-1, inner), kept[..., line - width :]], -1
            )
            if not self.until_limit:
                break
        return kept
