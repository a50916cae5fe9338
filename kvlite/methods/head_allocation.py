"""How a layer's heads share what it may keep: equally, by competing, or by their ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvlite.methods.base import LayerView
from kvlite.methods.competition import compete
from kvlite.methods.rank import group_sizes, head_groups
from kvlite.methods.select import to_choose, with_ends, won
from kvlite.model.calibration import Calibration

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import Selection


class HeadAllocation(Protocol):
    """Shares a layer's entries out over its heads."""

    def select(
        self, view: LayerView, scores: "Sequence[Tensor]", first: int, last: int
    ) -> "list[Selection]":
        """What the heads keep: their first and last entries, and the best of those in between.

        Args:
            scores: of each head group, `(batch, heads, used - first - last)`.
        """


@dataclass(frozen=True)
class EqualHeads:
    """Every head keeps equally many."""

    def select(
        self, view: LayerView, scores: "Sequence[Tensor]", first: int, last: int
    ) -> "list[Selection]":
        """The best in between of each head."""
        from kvlite.cache import Selection

        count = view.budget - first - last
        return [
            Selection(head_group, with_ends(each, head_group, count, first, last))
            for head_group, each in zip(view.head_groups, scores, strict=True)
        ]


@dataclass(frozen=True)
class CompetingHeads:
    """The best entries of all heads stay.

    Source: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference", section 3.4.

    Attributes:
        floor: the share of an equal head's choice that every head is sure of.
    """

    floor: float

    def select(
        self, view: LayerView, scores: "Sequence[Tensor]", first: int, last: int
    ) -> "list[Selection]":
        """The best in between of all heads."""
        total = to_choose(view.head_groups, view.budget, first, last)
        counts = compete(scores, total, int(self.floor * (view.budget - first - last)))
        return won(view.head_groups, scores, counts, first, last)


@dataclass(frozen=True)
class RankedHeads:
    """Heads whose queries spread in more directions keep more.

    Source: "UNComp: Can Matrix Entropy Uncover Sparsity?", section 3.3.

    Attributes:
        groups: of heads, by rank.
        low: entries a head of the last group keeps; 0 for half of the first's.
        calibration: what was measured of the model.
    """

    groups: int
    low: int
    calibration: Calibration

    def sizes(self, layer: int, budget: int, least: int) -> list[int]:
        """Entries of each KV head of a layer, by its group, `least` of them at least."""
        groups = head_groups(self.calibration.heads_by_rank(layer), self.groups)
        return group_sizes(groups, budget, self.low or None, least)

    def select(
        self, view: LayerView, scores: "Sequence[Tensor]", first: int, last: int
    ) -> "list[Selection]":
        """As many in between as a head's group keeps."""
        sizes = self.sizes(view.layer, view.budget, first + last + 1)
        counts = [
            [min(sizes[head], head_group.used) - first - last for head in head_group.heads]
            for head_group in view.head_groups
        ]
        return won(view.head_groups, scores, counts, first, last)
