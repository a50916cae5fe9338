"""Methods that rank entries: the votes are each method's own; how they are pooled, and how the
budget is shared out over layers and heads, is common to all and can be combined freely."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvlite.methods.across import Across, GlobalAllocation
from kvlite.methods.allocation import BY_VOTES, LayerLine, by_groups, layer_line
from kvlite.methods.base import NO_OPTION, LayerView, Method
from kvlite.methods.rank import group_sizes, head_groups, layer_groups
from kvlite.methods.scores import Pooling, Reduce, Window, pool, window_scores
from kvlite.methods.select import between, provided, to_choose, with_ends, won
from kvlite.methods.share import by_spread, compete, compete_everywhere
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import KVHeadGroup, LayerCache, Selection


@dataclass(frozen=True)
class Scored(Method):
    """Keeps a line's first few entries, its last few, and the best of those in between.

    Attributes:
        pool: how many neighbours a vote is spread over, so that spans are kept; odd.
        pooling: "max" or "avg".
        layers: how the budget is shared out over layers: "uniform", "pyramid" (falls evenly),
            "geometric", "exponential"; "rank", falling over UNComp's layer groups; or, once all
            are read, by their votes: "entropy", "gini", or "global", where all heads of all layers
            compete.
        beta: steepness of falling lines; the last layer of a pyramid chooses 1 / beta of the mean.
        per_head: let a layer's heads compete for its entries, instead of equal shares.
        floor: the share of an equal line's choice that every head is sure of, where any compete.
        groups: groups of a layer's heads by the effective rank of their queries (UNComp); the
            lower a group's rank, the shorter its lines. 1 for equal lines.
        low: with `groups`, entries a head of the last group keeps; 0 for half of the first's.
        drop: with layers="rank", by how much the rank falls where a new group of layers begins.
        calibration: what was measured of the model.
    """

    pool: int = 1
    pooling: Pooling = "max"
    layers: LayerLine = "uniform"
    beta: float = 20
    per_head: bool = False
    floor: float = 0.2
    groups: int = 1
    low: int = 0
    drop: float = 1.0
    calibration: Calibration | None = field(default=None, metadata=NO_OPTION)

    def __post_init__(self) -> None:
        self.require("pool", self.pool >= 1 and self.pool % 2 == 1, "an odd number")
        self.require("beta", self.beta >= 1, "1 or more")
        self.require("floor", 0 <= self.floor <= 1, "from 0 to 1")
        self.require("groups", self.groups >= 1, "1 or more")
        self.require("low", self.low >= 0, "0 or more")
        self.require("drop", self.drop >= 0, "0 or more")
        drop = Scored.drop
        self.require("drop", self.groups_layers or self.drop == drop, f"{drop} but for layers=rank")
        self.require("low", self.groups > 1 or not self.low, "0 without groups")
        alone = not self.per_head and not self.shares_layers
        self.require("groups", self.groups == 1 or alone, "1 where heads or layers compete")

    @property
    def uses_calibration(self) -> bool:
        """Whether the model's heads or layers are grouped by their effective rank."""
        return self.groups > 1 or self.groups_layers

    @property
    def groups_layers(self) -> bool:
        """Whether layers are grouped by the effective rank of their queries."""
        return self.layers == "rank"

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        """With the model's ranks, where they are used.

        Raises:
            SettingError: there are none, or a layer has not as many heads as groups.
        """
        heads = shape.kv_heads
        self.require("groups", self.groups <= heads, f"at most {heads} with this model")
        if not self.uses_calibration:
            return self
        known = self.require_calibration(calibration)
        seeing = tuple(known.layer_ranks[layer] for layer in shape.full_layers)
        return replace(self, calibration=replace(known, layer_ranks=seeing))

    @property
    def by_attention(self) -> bool:
        """Votes are, unless a method says otherwise."""
        return True

    @abstractmethod
    def ends(self, budget: int) -> tuple[int, int]:
        """How many first and last entries of a line stay, whatever their score."""

    @property
    def least_budget(self) -> int:
        """What stays whatever its score, and one chosen entry."""
        return sum(self.ends(0)) + 1

    @property
    def ragged(self) -> bool:
        """Heads that compete end up with lines of different length."""
        return self.per_head or self.layers == "global" or self.groups > 1

    @property
    def shares_layers(self) -> bool:
        """Where votes of all layers decide."""
        return self.layers in BY_VOTES

    @cached_property
    def across(self) -> Across:
        """Layers share the budget where votes of all of them decide."""
        return Across(sharing=GlobalAllocation(self.share) if self.shares_layers else None)

    @property
    def beside(self) -> int:
        """Entries a layer keeps beside what a falling line shares out."""
        return 0

    def budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """The line over layers; prompts within the budget are left alone."""
        if self.layers == "rank":
            return by_groups(
                self.layer_groups,
                average,
                seen,
                beside=self.beside,
                beta=self.beta,
                least=self.least_budget - self.beside,
            )
        return layer_line(
            self.layers,
            average,
            layers,
            seen,
            beside=self.beside,
            beta=self.beta,
            least=self.least_budget - self.beside,
        )

    @abstractmethod
    def votes(self, head_groups: "Sequence[KVHeadGroup]", window: Window) -> "list[Tensor]":
        """How much each entry matters, `(batch, heads, used)` float32 a head group, at the window's
        place: `window_scores` are there, what a head group remembers is brought by `window.beside`.

        Args:
            head_groups: a layer's, ascending in position.
            window: as many of the last queries as `observation` asked for.
        """

    def heard(self, view: LayerView) -> "list[Tensor]":
        """The votes, where entries are chosen."""
        window = view.window.last(self.observation(view.budget))
        return [window.backend.scores(each) for each in self.votes(view.head_groups, window)]

    def select(self, view: LayerView) -> "list[Selection]":
        """The first, the best in between by pooled score, and the last."""
        from kvlite.cache import Selection

        first, last = self.ends(view.budget)
        scores = [
            pool(between(each, first, last), self.pool, self.pooling) for each in self.heard(view)
        ]
        if view.provision is not None:
            return [
                provided(each, head_group, min(view.provision, head_group.used), first, last)
                for head_group, each in zip(view.head_groups, scores, strict=True)
            ]
        chosen = view.budget - first - last
        if self.groups > 1:
            sizes = self.head_sizes(view.layer, view.budget)
            counts = [
                [min(sizes[head], head_group.used) - first - last for head in head_group.heads]
                for head_group in view.head_groups
            ]
            return won(view.head_groups, scores, counts, first, last)
        if not self.per_head:
            return [
                Selection(head_group, with_ends(each, head_group, chosen, first, last))
                for head_group, each in zip(view.head_groups, scores, strict=True)
            ]
        total = to_choose(view.head_groups, view.budget, first, last)
        counts = compete(scores, total, int(self.floor * chosen))
        return won(view.head_groups, scores, counts, first, last)

    @property
    def layer_groups(self) -> list[int]:
        """UNComp's group of each layer that sees everything."""
        ranks = self.require_calibration(self.calibration).layer_ranks
        return layer_groups(ranks, self.drop)

    def head_sizes(self, layer: int, budget: int) -> list[int]:
        """Entries of each KV head of a layer, by its group."""
        groups = head_groups(self.by_rank(layer), self.groups)
        return group_sizes(groups, budget, self.low or None, sum(self.ends(budget)) + 1)

    def by_rank(self, layer: int) -> list[int]:
        """KV heads of a layer, the highest rank first."""
        known = self.require_calibration(self.calibration)
        ranks, wins = known.head_ranks[layer], known.head_wins[layer]
        return sorted(range(len(ranks)), key=lambda head: (-wins[head], -ranks[head], head))

    def share(self, layers: "Sequence[LayerCache]", average: int) -> "list[list[Selection]]":
        """By the votes of all layers: all heads compete, or each layer gets a share by how its
        votes are spread ("PyramidKV", section 6.5), and its heads equal ones or what they win."""
        first, last = self.ends(average)
        chosen = average - first - last
        sure = int(self.floor * chosen)
        votes = [
            [between(_votes(head_group), first, last) for head_group in each.head_groups]
            for each in layers
        ]
        if self.layers == "global":
            head_groups = [head_group for each in layers for head_group in each.head_groups]
            counts = compete_everywhere(votes, to_choose(head_groups, average, first, last), sure)
        else:
            lines = by_spread(votes, self.layers, chosen, max(1, sure))
            counts = [
                compete(
                    each,
                    line * sum(vote.shape[1] for vote in each),
                    sure if self.per_head else line,
                )
                for each, line in zip(votes, lines, strict=True)
            ]
        return [
            won(layer.head_groups, each, count, first, last)
            for layer, each, count in zip(layers, votes, counts, strict=True)
        ]


def _votes(head_group: "KVHeadGroup") -> "Tensor":
    assert head_group.votes is not None
    return head_group.votes


@dataclass(frozen=True)
class Observed(Scored):
    """Ranked by the attention that the last queries pay.

    Attributes:
        queries: how votes of the observed rows are joined: "sum", "mean" or "max".
        heads: how votes of a KV head's query heads are joined.
    """

    queries: Reduce = "sum"
    heads: Reduce = "mean"

    def votes(self, head_groups: "Sequence[KVHeadGroup]", window: Window) -> "list[Tensor]":
        """The observed attention."""
        return [
            window_scores(head_group, window, self.queries, self.heads)
            for head_group in head_groups
        ]


def over_heads(
    votes: "Sequence[Tensor]", positions: "Sequence[Tensor]", end: int
) -> "list[Tensor]":
    """One vote for all heads of a layer: the mean over them, by position, since lines of earlier
    turns may differ; in the shape of each head group's.

    Args:
        votes, positions: of each head group's entries, `(batch, heads, used)`.
        end: the position after the last.
    """
    places = [each.flatten(1).long() for each in positions]
    total = votes[0].new_zeros(votes[0].shape[0], end)
    for place, each in zip(places, votes, strict=True):
        total.scatter_add_(1, place, each.flatten(1))
    total /= sum(each.shape[1] for each in votes)
    return [total.gather(1, place).view_as(each) for place, each in zip(places, votes, strict=True)]
