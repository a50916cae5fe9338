"""How the budget is shared out over layers: by a line drawn before reading, by the layers' ranks,
or by the scores of all layers once they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvlite.methods.allocation import LayerLine, by_groups, layer_line
from kvlite.methods.competition import by_spread, compete, compete_everywhere
from kvlite.methods.rank import layer_groups
from kvlite.methods.select import between, to_choose, won
from kvlite.model.calibration import Calibration

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import KVHeadGroup, LayerCache, Selection


class LayerAllocation(Protocol):
    """Shares the budget out over layers, before anything is read."""

    def budgets(
        self, layers: int, average: int, seen: int, *, beside: int, least: int
    ) -> list[int]:
        """Entries a KV head each layer keeps, summing to `layers * average`.

        Args:
            average: mean entries a KV head and layer.
            seen: tokens to choose from.
            beside: entries every layer keeps beside what is shared out.
            least: entries of what is shared out that every layer gets.
        """


@dataclass(frozen=True)
class ByLine:
    """A line over layers.

    Attributes:
        kind: of the line.
        beta: its steepness.
    """

    kind: LayerLine
    beta: float

    def budgets(
        self, layers: int, average: int, seen: int, *, beside: int, least: int
    ) -> list[int]:
        """On the line; prompts within the budget are left alone."""
        return layer_line(
            self.kind, average, layers, seen, beside=beside, beta=self.beta, least=least
        )


@dataclass(frozen=True)
class ByRank:
    """Layers of a group get the same, and the groups fall evenly.

    Source: "UNComp: Can Matrix Entropy Uncover Sparsity?", section 3.3.

    Attributes:
        drop: by how much the rank falls where a new group begins.
        beta: steepness.
        calibration: what was measured of the model.
    """

    drop: float
    beta: float
    calibration: Calibration

    def budgets(
        self, layers: int, average: int, seen: int, *, beside: int, least: int
    ) -> list[int]:
        """By each layer's group; prompts within the budget are left alone."""
        groups = layer_groups(self.calibration.layer_ranks, self.drop)
        return by_groups(groups, average, seen, beside=beside, beta=self.beta, least=least)


@dataclass(frozen=True)
class ByScores:
    """Layers share by their scores once all are read: all heads of all layers compete, or each
    layer gets a share by how its scores are spread ("PyramidKV", section 6.5), and its heads equal
    ones or what they win.

    Attributes:
        kind: "global", "entropy" or "gini".
        per_head: a layer's heads compete for its share.
        floor: the share of an equal head's choice that every head is sure of.
    """

    kind: LayerLine
    per_head: bool
    floor: float

    def share(
        self, layers: "Sequence[LayerCache]", average: int, first: int, last: int
    ) -> "list[list[Selection]]":
        """What each layer keeps.

        Args:
            average: mean entries a KV head and layer.
            first, last: entries at the ends of a head that stay.
        """
        chosen = average - first - last
        sure = int(self.floor * chosen)
        scores = [
            [between(_scores(head_group), first, last) for head_group in layer.head_groups]
            for layer in layers
        ]
        if self.kind == "global":
            head_groups = [head_group for layer in layers for head_group in layer.head_groups]
            counts = compete_everywhere(scores, to_choose(head_groups, average, first, last), sure)
        else:
            lines = by_spread(scores, self.kind, chosen, max(1, sure))
            counts = [
                compete(
                    each,
                    line * sum(part.shape[1] for part in each),
                    sure if self.per_head else line,
                )
                for each, line in zip(scores, lines, strict=True)
            ]
        return [
            won(layer.head_groups, each, count, first, last)
            for layer, each, count in zip(layers, scores, counts, strict=True)
        ]


def _scores(head_group: "KVHeadGroup") -> "Tensor":
    assert head_group.selection_scores is not None
    return head_group.selection_scores
