"""Methods that score entries and keep the best. Each method defines its own scores; pooling, and
how the budget is divided over layers and heads, can be combined freely."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvlite.errors import SettingError
from kvlite.methods.allocation import BY_SCORES, LayerLine, by_groups, layer_line
from kvlite.methods.base import NO_OPTION, LayerView, Method
from kvlite.methods.capabilities import Across, Needs
from kvlite.methods.competition import compete, share_by_scores
from kvlite.methods.rank import group_sizes, head_groups, layer_groups
from kvlite.methods.scores import Pooling, Reduce, Window, pool, window_scores
from kvlite.methods.select import between, candidates, select_counts, to_choose, with_ends
from kvlite.methods.types import KVHeadGroup, LayerCache, Position, Selection, Tensor
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape


@dataclass(frozen=True)
class Scored(Method):
    """Keeps each head's first few entries, its last few, and the best of those in between.

    Attributes:
        pool: how many neighbors a score is spread over, so that spans are kept; odd.
        pooling: "max" or "avg".
        layers: how the budget is divided over layers: "uniform"; "pyramid" (falls linearly),
            "geometric", "exponential"; "rank", falling over UNComp's layer groups; or by the scores
            of all layers, once all are read: "entropy", "gini", or "global", where all heads of all
            layers compete.
        beta: how steeply budgets fall; a pyramid's last layer chooses 1 / beta of the mean.
        per_head: let a layer's heads compete for its entries, instead of equal shares.
        floor: the part of an equal share that every head is guaranteed, if heads compete.
        groups: groups of a layer's heads by the effective rank of their queries (UNComp); the
            lower a group's rank, the fewer entries its heads keep. 1 for equal heads.
        low: with `groups`, entries that a head of the last group keeps; 0 for half of the first's.
        structure: factor on the scores of punctuation and white space (the training-free part of
            RestoreKV), before they are spread; 1 changes nothing.
        drop: with layers="rank", how far the rank must fall to begin a new group of layers.
        calibration: the model's measurements.
    """

    pool: int = 1
    pooling: Pooling = "max"
    layers: LayerLine = "uniform"
    beta: float = 20
    per_head: bool = False
    floor: float = 0.2
    groups: int = 1
    low: int = 0
    structure: float = 1.0
    drop: float = 1.0
    calibration: Calibration | None = field(default=None, metadata=NO_OPTION)

    at_least = {"beta": 1, "groups": 1, "low": 0, "drop": 0, "sinks": 0, "window": 0}
    # First and last entries that always stay; a method may make options of them.
    sinks = 0
    window = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("pool", self.pool >= 1 and self.pool % 2 == 1, "an odd number")
        self.require("structure", 0 <= self.structure <= 1, "from 0 to 1")
        self.require("floor", 0 <= self.floor <= 1, "from 0 to 1")
        drop = Scored.drop
        self.require("drop", self.groups_layers or self.drop == drop, f"{drop} but for layers=rank")
        self.require("low", self.groups > 1 or not self.low, "0 without groups")
        alone = not self.per_head and self.layers not in BY_SCORES
        self.require("groups", self.groups == 1 or alone, "1 where heads or layers compete")

    @abstractmethod
    def score(self, head_group: KVHeadGroup, window: Window) -> Tensor:
        """How much each entry of a head group, ascending in position, matters: `(batch, heads,
        used)` float32, at the window's place. `window_scores` are there already; move anything
        computed from the head group alone there with `window.to_scoring_device`.

        Args:
            window: as many of the last queries as `needs` asks for.
        """

    def ends(self, budget: int) -> tuple[int, int]:
        """How many first and last entries of a head stay, whatever their score."""
        return self.sinks, self.window

    @property
    def reserved_per_layer(self) -> int:
        """Entries that every layer keeps beside what is shared out over layers."""
        return 0

    @property
    def heads_agree(self) -> bool:
        """Whether all heads of a layer keep the same entries, by their mean score."""
        return False

    @property
    def min_budget(self) -> int:
        return sum(self.ends(0)) + 1

    @cached_property
    def needs(self) -> Needs:
        return Needs(attention=True)

    @property
    def groups_layers(self) -> bool:
        """Whether layers are grouped by the effective rank of their queries."""
        return self.layers == "rank"

    @property
    def needs_calibration(self) -> bool:
        return self.groups > 1 or self.groups_layers

    @property
    def needs_text(self) -> bool:
        return self.structure < 1

    @property
    def variable_head_lens(self) -> bool:
        return self.per_head or self.layers == "global" or self.groups > 1

    @property
    def measured(self) -> Calibration:
        """The calibration.

        Raises:
            SettingError: there is none.
        """
        if self.calibration is None:
            raise SettingError(
                f"{self.spec} needs to know this model's heads and layers: run `kvlite calibrate "
                "MODEL` once, which takes a few minutes"
            )
        return self.calibration

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        heads = shape.kv_heads
        self.require("groups", self.groups <= heads, f"at most {heads} with this model")
        if not self.needs_calibration:
            return self
        known = replace(self, calibration=calibration).measured
        seeing = tuple(known.layer_ranks[layer] for layer in shape.full_layers)
        return replace(self, calibration=replace(known, layer_ranks=seeing))

    def layer_budgets(self, layers: int, average: int, seen: int) -> list[int]:
        reserved, beta = self.reserved_per_layer, self.beta
        least = self.min_budget - reserved
        if self.layers == "rank":
            groups = layer_groups(self.measured.layer_ranks, self.drop)
            return by_groups(groups, average, seen, reserved=reserved, beta=beta, least=least)
        given = self.layers, average, layers, seen
        return layer_line(*given, reserved=reserved, beta=beta, least=least)

    @cached_property
    def across(self) -> Across:
        return Across(sharing=self._share if self.layers in BY_SCORES else None)

    def _share(self, layers: Sequence[LayerCache], average: int) -> list[list[Selection]]:
        first, last = self.ends(average)
        floor, per_head = self.floor, self.per_head
        given = self.layers, layers, average
        return share_by_scores(*given, first=first, last=last, floor=floor, per_head=per_head)

    def head_sizes(self, layer: int, budget: int, least: int) -> list[int]:
        """Entries of each KV head of a layer whose heads are in `groups`, `least` at least."""
        groups = head_groups(self.measured.heads_by_rank(layer), self.groups)
        return group_sizes(groups, budget, self.low or None, least)

    def scores(self, view: LayerView) -> list[Tensor]:
        """The scores of each head group, where entries are chosen."""
        window = view.window.last(self.needs.num_queries(view.budget))
        scores = [self.score(head_group, window) for head_group in view.head_groups]
        if view.structural is not None and self.needs_text:
            for head_group, each in zip(view.head_groups, scores, strict=True):
                each *= window.to_scoring_device(self._structure(head_group, view.structural))
        if self.heads_agree:
            positions = [
                window.to_scoring_device(head_group.positions[:, :, : head_group.used])
                for head_group in view.head_groups
            ]
            scores = over_heads(scores, positions, window.end)
        return [window.backend.scores(each) for each in scores]

    def _structure(self, head_group: KVHeadGroup, structural: Tensor) -> Tensor:
        """What the scores of a head group are multiplied by, `(batch, heads, used)`."""
        positions = head_group.positions[:, :, : head_group.used].long()
        lines = structural.to(positions.device)[:, None].expand(-1, positions.shape[1], -1)
        return 1 - (1 - self.structure) * lines.gather(2, positions).float()

    def decode_scores(self, head_group: KVHeadGroup, end: Position) -> Tensor:
        """The remembered attention `(batch, heads, used)` of a head group, for `evict` and `trim`.

        Args:
            end: the position after the last entry.
        """
        scores = head_group.scores()
        if self.heads_agree:
            positions = head_group.positions[:, :, : head_group.used]
            (scores,) = over_heads([scores], [positions], end)
        return scores

    def select(self, view: LayerView) -> list[Selection]:
        first, last = self.ends(view.budget)
        scores = [
            pool(between(each, first, last), self.pool, self.pooling) for each in self.scores(view)
        ]
        both = list(zip(view.head_groups, scores, strict=True))
        if view.candidate_budget is not None:
            return [
                candidates(
                    each, head_group, min(view.candidate_budget, head_group.used), first, last
                )
                for head_group, each in both
            ]
        chosen = view.budget - first - last
        if self.groups > 1:
            sizes = self.head_sizes(view.layer, view.budget, first + last + 1)
            counts = [
                [max(0, min(sizes[h], head_group.used) - first - last) for h in head_group.heads]
                for head_group in view.head_groups
            ]
        elif self.per_head:
            total = to_choose(view.head_groups, view.budget, first, last)
            counts = compete(scores, total, int(self.floor * chosen))
        else:
            return view.keep(
                with_ends(each, head_group, chosen, first, last) for head_group, each in both
            )
        return select_counts(view.head_groups, scores, counts, first, last)


@dataclass(frozen=True)
class Observed(Scored):
    """Scores entries by the attention of the last queries.

    Attributes:
        queries: how the attention of these queries is combined: "sum", "mean" or "max".
        heads: how the attention of a KV head's query heads is combined, likewise.
    """

    queries: Reduce = "sum"
    heads: Reduce = "mean"

    def score(self, head_group: KVHeadGroup, window: Window) -> Tensor:
        return window_scores(head_group, window, self.queries, self.heads)


def over_heads(
    scores: Sequence[Tensor], positions: Sequence[Tensor], end: Position
) -> list[Tensor]:
    """One score for all heads of a layer: the mean over them, by position, since heads may
    differ after earlier turns; in the shape of each head group's.

    Args:
        scores, positions: of each head group's entries, `(batch, heads, used)`.
        end: the position after the last.
    """
    places = [each.flatten(1).long() for each in positions]
    if not isinstance(end, int):  # the host does not know how many positions there are
        places, end = _ranks(places), sum(each.shape[1] for each in places)
    total = scores[0].new_zeros(scores[0].shape[0], end)
    for place, each in zip(places, scores, strict=True):
        total.scatter_add_(1, place, each.flatten(1))
    total /= sum(each.shape[1] for each in scores)
    return [
        total.gather(1, place).view_as(each) for place, each in zip(places, scores, strict=True)
    ]


def _ranks(places: Sequence[Tensor]) -> list[Tensor]:
    """Numbers `(batch, n)` by order, equal ones alike, so that none is as large as all are many."""
    import torch

    joined = torch.cat([*places], 1)
    order = joined.sort(dim=1, stable=True)
    rises = torch.zeros_like(joined)
    rises[:, 1:] = order.values.diff(dim=1) > 0
    ranks = torch.empty_like(joined).scatter_(1, order.indices, rises.cumsum(1))
    return [*ranks.split([each.shape[1] for each in places], 1)]
