"""TOVA: what the newest token attends to, the same tokens for all heads."""

from dataclasses import dataclass
from functools import cached_property

from kvlite.methods.capabilities import Decoding, Needs
from kvlite.methods.scored import Scored
from kvlite.methods.scores import Window, window_scores
from kvlite.methods.types import KVHeadGroup, Position, Tensor


@dataclass(frozen=True)
class TOVA(Scored):
    """Keeps the tokens that the last one attends to most, by the mean over a layer's heads. While
    answering, each new token evicts the one it attends to least. With `per_head`, each KV head
    keeps its own tokens.

    The last token always stays; the paper leaves it to its score.
    """

    name = "tova"
    summary = "keeps what the newest token attends to, at every step"
    paper = "Transformers are Multi-State RNNs, section 3.2"

    needs = Needs(queries=1, attention=True)
    window = 1

    @property
    def heads_agree(self) -> bool:
        return not self.per_head and self.groups == 1

    @cached_property
    def decoding(self) -> Decoding:
        return Decoding(rows=1, evict=self.evict)

    def score(self, head_group: KVHeadGroup, window: Window) -> Tensor:
        return window_scores(head_group, window, "sum", "mean")

    def evict(self, head_group: KVHeadGroup, budget: int, position: Position) -> Tensor:
        """The entry that the previous token attended to least, except for that token itself."""
        import torch

        scores = self.decode_scores(head_group, position)
        return scores.masked_fill(head_group.positions == position - 1, torch.inf).argmin(-1)
