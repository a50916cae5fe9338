"""Methods that score entries and keep the best: how entries are scored is each method's own; how
scores are pooled, and the budget shared out over layers and heads, can be combined freely."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvlite.methods.across import Across, GlobalAllocation
from kvlite.methods.allocation import BY_SCORES, LayerLine
from kvlite.methods.base import NO_OPTION, LayerView, Method, Needs
from kvlite.methods.head_allocation import CompetingHeads, EqualHeads, HeadAllocation, RankedHeads
from kvlite.methods.layer_allocation import ByLine, ByRank, ByScores, LayerAllocation
from kvlite.methods.scores import Pooling, Reduce, Window, pool, window_scores
from kvlite.methods.select import between, provided
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import KVHeadGroup, LayerCache, Selection


@dataclass(frozen=True)
class Scored(Method):
    """Keeps a head's first few entries, its last few, and the best of those in between.

    Attributes:
        pool: how many neighbours a score is spread over, so that spans are kept; odd.
        pooling: "max" or "avg".
        layers: how the budget is shared out over layers: "uniform", "pyramid" (falls evenly),
            "geometric", "exponential"; "rank", falling over UNComp's layer groups; or, once all
            are read, by their scores: "entropy", "gini", or "global", where all heads of all layers
            compete.
        beta: steepness of falling lines; the last layer of a pyramid chooses 1 / beta of the mean.
        per_head: let a layer's heads compete for its entries, instead of equal shares.
        floor: the share of an equal head's choice that every head is sure of, where any compete.
        groups: groups of a layer's heads by the effective rank of their queries (UNComp); the
            lower a group's rank, the fewer entries its heads keep. 1 for equal heads.
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

    @abstractmethod
    def ends(self, budget: int) -> tuple[int, int]:
        """How many first and last entries of a head stay, whatever their score."""

    @abstractmethod
    def score(self, head_groups: "Sequence[KVHeadGroup]", window: Window) -> "list[Tensor]":
        """How much each entry matters, `(batch, heads, used)` float32 a head group, at the window's
        place: `window_scores` are there, what a head group remembers is brought by `window.beside`.

        Args:
            head_groups: a layer's, ascending in position.
            window: as many of the last queries as `needs` asks for.
        """

    @cached_property
    def needs(self) -> Needs:
        """Attention, unless a method says otherwise, and ranks where heads or layers go by them."""
        return Needs(attention=True, calibration=self.groups > 1 or self.groups_layers)

    @property
    def min_budget(self) -> int:
        """What stays whatever its score, and one chosen entry."""
        return sum(self.ends(0)) + 1

    @property
    def beside(self) -> int:
        """Entries a layer keeps beside what is shared out over layers."""
        return 0

    @property
    def shares_layers(self) -> bool:
        """Whether layers share the budget by their scores."""
        return self.layers in BY_SCORES

    @property
    def groups_layers(self) -> bool:
        """Whether layers are grouped by the effective rank of their queries."""
        return self.layers == "rank"

    @property
    def variable_head_lens(self) -> bool:
        """Where heads compete, or are grouped."""
        return self.per_head or self.layers == "global" or self.groups > 1

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        """With the model's ranks, where they are used.

        Raises:
            SettingError: there are none, or a layer has not as many heads as groups.
        """
        heads = shape.kv_heads
        self.require("groups", self.groups <= heads, f"at most {heads} with this model")
        if not self.needs.calibration:
            return self
        known = self.require_calibration(calibration)
        seeing = tuple(known.layer_ranks[layer] for layer in shape.full_layers)
        return replace(self, calibration=replace(known, layer_ranks=seeing))

    @cached_property
    def layer_allocation(self) -> LayerAllocation:
        """How the budget is shared out over layers before they are read."""
        if self.layers == "rank":
            return ByRank(self.drop, self.beta, self.require_calibration(self.calibration))
        return ByLine(self.layers, self.beta)

    @cached_property
    def head_allocation(self) -> HeadAllocation:
        """How a layer's heads share what it may keep."""
        if self.groups > 1:
            known = self.require_calibration(self.calibration)
            return RankedHeads(self.groups, self.low, known)
        return CompetingHeads(self.floor) if self.per_head else EqualHeads()

    @cached_property
    def across(self) -> Across:
        """Layers share the budget where the scores of all of them decide."""
        return Across(sharing=GlobalAllocation(self._share) if self.shares_layers else None)

    def _share(self, layers: "Sequence[LayerCache]", average: int) -> "list[list[Selection]]":
        by_scores = ByScores(self.layers, self.per_head, self.floor)
        return by_scores.share(layers, average, *self.ends(average))

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """Prompts within the budget are left alone."""
        beside, least = self.beside, self.min_budget - self.beside
        given = layers, average, seen
        return self.layer_allocation.budgets(*given, beside=beside, least=least)

    def scores(self, view: LayerView) -> "list[Tensor]":
        """The scores, where entries are chosen."""
        window = view.window.last(self.needs.num_queries(view.budget))
        return [window.backend.scores(each) for each in self.score(view.head_groups, window)]

    def select(self, view: LayerView) -> "list[Selection]":
        """The first, the best in between by pooled score, and the last."""
        first, last = self.ends(view.budget)
        scores = [
            pool(between(each, first, last), self.pool, self.pooling) for each in self.scores(view)
        ]
        if view.provision is None:
            return self.head_allocation.select(view, scores, first, last)
        return [
            provided(each, head_group, min(view.provision, head_group.used), first, last)
            for head_group, each in zip(view.head_groups, scores, strict=True)
        ]


@dataclass(frozen=True)
class Observed(Scored):
    """Scored by the attention that the last queries pay.

    Attributes:
        queries: how attention of the observed rows is joined: "sum", "mean" or "max".
        heads: likewise of a KV head's query heads.
    """

    queries: Reduce = "sum"
    heads: Reduce = "mean"

    def score(self, head_groups: "Sequence[KVHeadGroup]", window: Window) -> "list[Tensor]":
        """The observed attention."""
        return [
            window_scores(head_group, window, self.queries, self.heads)
            for head_group in head_groups
        ]


def over_heads(
    scores: "Sequence[Tensor]", positions: "Sequence[Tensor]", end: int
) -> "list[Tensor]":
    """One score for all heads of a layer: the mean over them, by position, since lines of earlier
    turns may differ; in the shape of each head group's.

    Args:
        scores, positions: of each head group's entries, `(batch, heads, used)`.
        end: the position after the last.
    """
    places = [each.flatten(1).long() for each in positions]
    total = scores[0].new_zeros(scores[0].shape[0], end)
    for place, each in zip(places, scores, strict=True):
        total.scatter_add_(1, place, each.flatten(1))
    total /= sum(each.shape[1] for each in scores)
    return [
        total.gather(1, place).view_as(each) for place, each in zip(places, scores, strict=True)
    ]
