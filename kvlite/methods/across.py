"""What a method may decide about whole layers, beside which entries each of them keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvlite.cache.bits import KVBits

if TYPE_CHECKING:
    from kvlite.cache import CompressedSegment, KVHeadGroup, LayerCache, Selection
    from kvlite.methods.base import LayerView, Method

    Groups: TypeAlias = Sequence[KVHeadGroup]
    Merge: TypeAlias = Callable[
        [Groups, Groups, KVBits | None], list[tuple[CompressedSegment, CompressedSegment]]
    ]


@dataclass(frozen=True)
class MergePairs:
    """Layers are merged in pairs, and none of their entries dropped; other layers keep everything.

    Attributes:
        pairs: layers to merge, (lower, upper), each in one pair at most, given the sliding window
            of each layer of the model, None where it sees everything.
        merge: given the head groups of the lower and the upper layer, ascending in position, and
            how what they share is quantized, if it is: all entries in a smaller form, two segments
            a head group, the lower layer's first; none if these two cannot be merged, and stay as
            they are.
    """

    pairs: Callable[[Sequence[int | None]], list[tuple[int, int]]]
    merge: "Merge"


@dataclass(frozen=True)
class GlobalAllocation:
    """Layers share the budget by their votes once all are read: until then `select` keeps
    `view.provision` entries, with their votes.

    Attributes:
        share: given the layers that exceeded their budget, and the mean entries a KV head and
            layer: what each of them keeps in the end, summing to that mean.
    """

    share: "Callable[[list[LayerCache], int], list[list[Selection]]]"


@dataclass(frozen=True)
class ResolveLayer:
    """Which method a layer is left to is found out when the layer has been looked at.

    Attributes:
        when: "read", once a layer was read, or "step", after the first step of an answer, until
            which the layer is not cut.
        resolve: given the layer, with the first step's query for a window if that is when: the
            method from there on, and its budget.
    """

    when: Literal["read", "step"]
    resolve: "Callable[[LayerView], tuple[Method, int]]"


@dataclass(frozen=True)
class Across:
    """What a method does across layers; nothing, for most."""

    merging: MergePairs | None = None
    sharing: GlobalAllocation | None = None
    resolving: ResolveLayer | None = None

    @property
    def resolves_at(self) -> Literal["read", "step"] | None:
        """When a layer's method is found out, if it is."""
        return None if self.resolving is None else self.resolving.when
