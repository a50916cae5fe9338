"""H2O: the entries that all tokens so far attended to most, and the recent ones."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvlite.methods.capabilities import Decoding
from kvlite.methods.scored import Scored
from kvlite.methods.scores import Window
from kvlite.methods.types import KVHeadGroup, Position, Tensor


@dataclass(frozen=True)
class H2O(Scored):
    """Heavy hitters: keeps the entries with the most attention, summed over all queries since the
    first, and the most recent ones. While answering, each new token evicts the lightest entry.

    Half of the budget is for recent entries, as in the paper's experiments. All of a prompt's
    queries count, so prefill computes their attention twice. A KV head's score is the mean over its
    query heads.

    Attributes:
        recent: last entries that stay; 0 for half of the budget.
        norm: "sum" as in the paper; "mean" divides by how many queries could see an entry, which
            removes the sum's bias toward early tokens.
    """

    name = "h2o"
    summary = "keeps the most attended tokens so far, and the latest"
    paper = (
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, "
        "section 4"
    )

    recent: int = 0
    norm: Literal["sum", "mean"] = "sum"

    at_least = {"recent": 0}

    def ends(self, budget: int) -> tuple[int, int]:
        return 0, self.recent or max(1, budget // 2)

    @cached_property
    def decoding(self) -> Decoding:
        return Decoding(rows=1, cumulative=True, evict=self.evict)

    def score(self, head_group: KVHeadGroup, window: Window) -> Tensor:
        return window.to_scoring_device(self._weight(head_group, window.end))

    def evict(self, head_group: KVHeadGroup, budget: int, position: Position) -> Tensor:
        """The lightest entry that is not recent; the newcomer counts to the recent ones."""
        import torch

        _, last = self.ends(budget)
        weight = self._weight(head_group, position)
        return weight.masked_fill(head_group.positions > position - last, torch.inf).argmin(-1)

    def _weight(self, head_group: KVHeadGroup, seen: Position) -> Tensor:
        if self.norm == "sum":
            return head_group.scores()
        return head_group.scores() / (seen - head_group.positions[..., : head_group.used])
