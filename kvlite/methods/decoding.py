"""What becomes of a layer's entries while an answer is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import KVHeadGroup


@dataclass(frozen=True)
class Decoding:
    """What a method does at each decode step; new entries are appended, unless it says more.

    Attributes:
        rows: how many attention rows a head group remembers, for `head_group.scores()` to add up.
        cumulative: a head group's one row is the sum of all attention since the first token read.
        evict: given a full head group, whose slots lie in any order, its budget, and the position
            of the new token: the slots that this token overwrites, `(batch, heads)` int64. A layer
            then stays within its budget.
        trim: given a head group and its budget, after a step: the slots that stay, `(batch, heads,
            kept)` int64, ascending in position, where more than one goes; None keeps everything.
        drops: layers are left to methods that may drop entries, whatever stands here.
    """

    rows: int = 0
    cumulative: bool = False
    evict: "Callable[[KVHeadGroup, int, int], Tensor] | None" = None
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
