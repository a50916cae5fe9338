"""TOVA: what the newest token looks at, the same tokens for all heads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from kvlite.methods.base import Needs
from kvlite.methods.decoding import Decoding
from kvlite.methods.scored import Scored, over_heads
from kvlite.methods.scores import Window, window_scores

if TYPE_CHECKING:
    from torch import Tensor

    from kvlite.cache import KVHeadGroup


@dataclass(frozen=True)
class TOVA(Scored):
    """Keeps the tokens that the last one attends to, by the mean over a layer's heads; while
    answering, each new token costs the one it attends to least. With `per_head`, each KV head keeps
    its own.

    Source: "Transformers are Multi-State RNNs", section 3.2. The last token itself always stays,
    which the paper leaves to its score.
    """

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "keeps what the newest token attends to, at every step"
    paper: ClassVar[str] = "Transformers are Multi-State RNNs, section 3.2"

    @property
    def _alike(self) -> bool:
        """Whether all heads keep the same tokens."""
        return not self.per_head and self.groups == 1

    def ends(self, budget: int) -> tuple[int, int]:
        """The last token."""
        return 0, 1

    @cached_property
    def decoding(self) -> Decoding:
        """The newest token votes; one token in, one out."""
        return Decoding(rows=1, evict=self.evict)

    @cached_property
    def needs(self) -> Needs:
        """The last token's attention."""
        return replace(super().needs, queries=1)

    def score(self, head_groups: "Sequence[KVHeadGroup]", window: Window) -> "list[Tensor]":
        """The last token's attention."""
        votes = [window_scores(head_group, window, "sum", "mean") for head_group in head_groups]
        if not self._alike:
            return votes
        positions = [
            window.beside(head_group.positions[:, :, : head_group.used])
            for head_group in head_groups
        ]
        return over_heads(votes, positions, window.end)

    def evict(self, head_group: "KVHeadGroup", budget: int, position: int) -> "Tensor":
        """What the token before attended to least, that token itself apart."""
        import torch

        votes = head_group.scores()
        if self._alike:
            (votes,) = over_heads(
                [votes], [head_group.positions[:, :, : head_group.used]], position
            )
        return votes.masked_fill(head_group.positions == position - 1, torch.inf).argmin(-1)
