"""KV-X: a lambda mask of sink and stream entries, and the top k of the middle, in every layer."""

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
    """Keeps sink and stream entries by position and the middle by attention, with smaller budgets
    in higher layers, during prefill and at every decode step.

    The paper leaves open the first and the last layer's budget (kvlite takes PyramidKV's, which the
    paper follows), whether scores are per head (they are, unless `per_layer`), and how much a cut
    keeps. For the latter it allows two readings:

    - middle="budget" (Eq. 6): a head with budget C keeps C/(2 omega) sinks, as many stream entries,
      and fills up with the best of the middle. While decoding, each new token evicts the weakest
      middle entry.
    - middle="example" (the example of section 4, which agrees with Table 1's memory): a head with
      N entries keeps N/(2 omega) sinks, stream and middle entries each, whenever it exceeds the
      context limit.

    Attributes:
        omega: lambda mask width: the mask takes 1/omega of the budget (2, 4, 8, 16, 32).
        middle: which reading, "budget" or "example".
        limit: with "example", entries a head must exceed to be cut; 0 for the budget.
        until_limit: with "example", repeat the cut until the head is within the limit.
        alpha: last queries that score entries in prefill; 0 for as many as the budget (the paper).
        decode: "evict": each new token evicts an entry (the paper); "grow": entries chosen in
            prefill stay, and the answer is added.
        recent: attention rows that score entries while decoding.
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
    min_budget = 3  # a sink, a stream entry and a middle one

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
        # A line of the "example" reading may stay longer than its limit.
        return self.middle == "budget"

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """Lines on the arithmetic slope of Eq. 2; in the "example" reading the limit itself."""
        if self.middle == "example":
            return [self.limit or average] * layers
        return super().layer_budgets(layers, average, seen)

    def ends(self, budget: int) -> tuple[int, int]:
        """The lambda mask of a line: sinks, and as many stream entries (Eq. 5)."""
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
        """The weakest entry between sinks and stream; the newcomer counts to the stream."""
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
