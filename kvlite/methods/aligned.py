"""The window of layers that attend within chunks: the part of the next token's chunk so far."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Decoding
from kvlite.methods.select import ends
from kvlite.methods.types import KVHeadGroup, Selection, Tensor


@dataclass(frozen=True)
class Aligned(Method):
    """Drops a chunk once it is full, since no later token sees any of it. Its budget is one entry
    less than a chunk has."""

    name: ClassVar[str] = "aligned"
    summary: ClassVar[str] = "keeps the chunk that the next token is in"
    paper: ClassVar[str] = "none"

    @cached_property
    def decoding(self) -> Decoding:
        return Decoding(trim=self.trim)

    def select(self, view: LayerView) -> list[Selection]:
        begun = view.window.end % (view.budget + 1)
        return view.keep(ends(head_group, 0, begun) for head_group in view.head_groups)

    def trim(self, head_group: KVHeadGroup, budget: int) -> "Tensor | None":
        """Nothing of a full chunk."""
        return None if head_group.used <= budget else head_group.positions[:, :, :0].long()
