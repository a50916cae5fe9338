"""What a method may need, and what it may change: objects that the engine reads as fields."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvlite.cache.bits import KVBits
from kvlite.methods.types import KVHeadGroup, LayerCache, Position, Segment, Selection, Tensor
from kvlite.model.window import LocalWindow

if TYPE_CHECKING:
    from kvlite.methods.base import LayerView, Method

Groups: TypeAlias = Sequence[KVHeadGroup]
Segments: TypeAlias = list[tuple[Segment, Segment]]


@dataclass(frozen=True)
class Needs:
    """What a method has to be given to choose; by default nothing.

    Attributes:
        queries: how many of the last queries `select` wants in `view.window`, or a function of
            the budget.
        first: how many of the first queries of a turn `select` wants in `view.opening`.
        attention: it chooses by attention, so `view.window.backend` may score on the host.
    """

    queries: int | Callable[[int], int] = 0
    first: int = 0
    attention: bool = False

    def num_queries(self, budget: int) -> int:
        """How many of the last queries it wants."""
        return self.queries(budget) if callable(self.queries) else self.queries


@dataclass(frozen=True)
class LambdaMask:
    """Each token sees the first `sinks` tokens and the last `window`, its own included; a token at
    a position below `sinks + window` sees everything.

    Attributes:
        limit: rotate queries and sinks as if they were `window` tokens apart, however far they are.
    """

    sinks: int
    window: int
    limit: bool


@dataclass(frozen=True)
class VerticalSlash:
    """Before itself, a chunk attends to some columns and to what is near, not to everything.

    Attributes:
        count: entries further back, for each KV head: those with the most attention from the
            chunk's last `observed` queries, the first `sinks` always among them.
        near: entries just before the chunk.
    """

    count: int
    near: int
    observed: int
    sinks: int


@dataclass(frozen=True)
class TokenPruning:
    """Tokens are left behind between layers.

    Attributes:
        token_budgets: given the layers, the tokens to read, and the tokens seen once these are
            read: how many tokens each layer gets, never more than the layer before.
        prune_tokens: given a layer, how many tokens went through it (the last entries of its head
            groups), and how many go on: their indices, `(width,)` int64, ascending. The tokens of
            `view.window` are always among them.
    """

    token_budgets: Callable[[int, int, int], list[int]]
    prune_tokens: "Callable[[LayerView, int, int], Tensor]"


@dataclass(frozen=True)
class Reconstruction:
    """The model repeats what it read, `passage` tokens at a time, and may look at the first `sinks`
    entries and the passage meanwhile."""

    passage: int
    sinks: int


@dataclass(frozen=True)
class Prefilling:
    """How a method changes prefill; by default it does not.

    Attributes:
        mask: given the budget, what a token sees, in prefill and in decode. A layer then never
            holds more than its budget and one chunk; `evict` and `select` must agree with the mask.
        columns: sparse attention in prefill; nothing is dropped for it.
        pruning: which tokens go on from layer to layer.
        reconstruction: have the model repeat what it read before `select` is called, which takes
            about three times as long. A head group's one row (`decoding.rows` must be 1) is then
            the highest attention that each entry got.
        head_substitutes: given a layer that is about to be cut, the KV heads that it drops
            altogether, and for each the head whose attention output replaces its own.
    """

    mask: Callable[[int], LambdaMask] | None = None
    columns: VerticalSlash | None = None
    pruning: TokenPruning | None = None
    reconstruction: Reconstruction | None = None
    head_substitutes: "Callable[[LayerView], dict[int, int]] | None" = None

    @property
    def exact(self) -> bool:
        """Whether the logits after prefill are those of the full cache."""
        return self.mask is None and self.columns is None and self.pruning is None


@dataclass(frozen=True)
class Decoding:
    """What a method does at each decode step; by default new entries are appended.

    Attributes:
        rows: how many attention rows a head group remembers; `head_group.scores()` adds them up.
        cumulative: the one row is the sum of all attention since the first token read.
        evict: given a full head group, whose slots lie in any order, its budget, and the position
            of the new token, a number or a `(1,)` tensor on the device: the slots that this token
            overwrites, `(batch, heads)` int64. A layer then stays within its budget.
        trim: given a head group and its budget, after a step: the slots that stay, `(batch, heads,
            kept)` int64, ascending in position, or None to keep everything, as within the budget.
        drops: layers are left to methods that may drop entries, whatever the other fields say.
    """

    rows: int = 0
    cumulative: bool = False
    evict: Callable[[KVHeadGroup, int, Position], Tensor] | None = None
    trim: "Callable[[KVHeadGroup, int], Tensor | None] | None" = None
    drops: bool = False

    @property
    def bounded(self) -> bool:
        """Whether a layer stays within its budget."""
        return self.evict is not None

    @property
    def append_only(self) -> bool:
        """Whether no layer loses an entry."""
        return self.evict is None and self.trim is None and not self.drops


@dataclass(frozen=True)
class MergePairs:
    """Layers are merged in pairs and keep every entry; other layers keep everything, too.

    Attributes:
        pairs: given the window of each layer of the model (None for full attention): the
            layers to merge, (lower, upper), each in one pair at most.
        merge: given the head groups of the lower and the upper layer, ascending in position, and
            the bits to quantize what they share (or None): two segments a head group, the lower
            layer's first; none if these layers cannot be merged.
    """

    pairs: Callable[[Sequence[LocalWindow | None]], list[tuple[int, int]]]
    merge: Callable[[Groups, Groups, KVBits | None], Segments]


@dataclass(frozen=True)
class ResolveLayer:
    """Which method a layer gets is decided by looking at the layer.

    Attributes:
        when: "read", once a layer was read, or "step", after the first decode step, until which
            the layer is not cut.
        resolve: given the layer, and with "step" that step's query as its window: the method from
            there on, and its budget.
        least: entries that a layer keeps whatever is decided; below the budget, which then does not
            say whether anything is dropped.
    """

    when: Literal["read", "step"]
    resolve: "Callable[[LayerView], tuple[Method, int]]"
    least: int


@dataclass(frozen=True)
class Across:
    """What a method decides about whole layers; by default nothing.

    Attributes:
        merging: layers are merged in pairs.
        sharing: layers share the budget by their scores once all are read; until then `select`
            keeps `view.candidate_budget` entries, with their scores. Given the layers that exceeded
            their budget and the mean entries a KV head and layer: what each layer keeps.
        resolving: each layer is left to another method.
    """

    merging: MergePairs | None = None
    sharing: Callable[[list[LayerCache], int], list[list[Selection]]] | None = None
    resolving: ResolveLayer | None = None

    @property
    def resolves_at(self) -> Literal["read", "step"] | None:
        """When a layer's method is decided, if it is."""
        return None if self.resolving is None else self.resolving.when
