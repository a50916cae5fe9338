"""SnapKV: what the end of the prompt looks at, in small clusters."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlite.cache import Bank, Selection
from kvlite.methods.base import LayerView, Method
from kvlite.methods.scores import Pooling, Reduce, Window, pool, top, window_scores
from kvlite.methods.streaming import ends


@dataclass(frozen=True)
class SnapKV(Method):
    """The last `window` tokens vote, with their attention, for the earlier entries to keep.

    Source: "SnapKV: LLM Knows What You are Looking for Before Generation", section 4;
    defaults of its repository (window 32, max pooling over 7). Scores are reduced over the query
    heads of a KV head before they are pooled, so a KV head is stored once.

    Attributes:
        window: last tokens that vote, and stay.
        pool: how many neighbours a score is spread over; odd.
        pooling: "max" or "avg".
        queries: how votes of the window's rows are joined: "sum", "mean" or "max".
        heads: how votes of a KV head's query heads are joined.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "keeps what the prompt's last tokens attend to, the same in all layers"
    paper: ClassVar[str] = "SnapKV: LLM Knows What You are Looking for Before Generation, section 4"

    window: int = 32
    pool: int = 7
    pooling: Pooling = "max"
    queries: Reduce = "sum"
    heads: Reduce = "mean"

    def __post_init__(self) -> None:
        self.require("window", self.window >= 1, "1 or more")
        self.require("pool", self.pool >= 1 and self.pool % 2 == 1, "an odd number")

    @property
    def least_budget(self) -> int:
        """The window and one chosen entry."""
        return self.window + 1

    def observation(self, budget: int) -> int:
        """The window."""
        return self.window

    def select(self, view: LayerView) -> list[Selection]:
        """The top entries before the window, and the window."""
        chosen = view.budget - self.window
        return [
            Selection(bank, with_ends(self.scores(bank, view.window), bank, chosen, 0, self.window))
            for bank in view.banks
        ]

    def scores(self, bank: Bank, window: Window) -> Tensor:
        """Votes for the entries before the window, pooled: `(batch, heads, used - window)`."""
        votes = window_scores(bank, window.last(self.window), self.queries, self.heads)
        return pool(votes[..., : bank.used - self.window], self.pool, self.pooling)


def with_ends(scores: Tensor, bank: Bank, count: int, first: int, last: int) -> Tensor:
    """Slots of the `count` best entries by score, between the `first` and the `last` ones.

    Args:
        scores: `(batch, heads, used - first - last)`, of the entries in between.

    Returns:
        `(batch, heads, first + count + last)` int64, ascending.
    """
    outer = ends(bank, first, last)
    middle = top(scores, count) + first
    return torch.cat([outer[..., :first], middle, outer[..., first:]], -1)
