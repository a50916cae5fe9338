"""Which entries matter: attention from an observation window, pooled, and its top k.

Source: "SnapKV: LLM Knows What You are Looking for Before Generation", section 4; the rules for
grouped queries are ours (docs/architecture.md).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.attention import capped, grouped
from kvlite.cache import Bank

Reduce = Literal["sum", "mean", "max"]
Pooling = Literal["max", "avg"]

ELEMENTS_AT_ONCE, ROWS_AT_ONCE = 1 << 22, 128


@dataclass(frozen=True)
class Expected:
    """Queries as they are expected to come, rotated to where they will stand.

    Attributes:
        mean: `(batch, heads, dim)` float32.
        covariance: `(batch, heads, dim, dim)` float32.
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Window:
    """The queries a layer is judged by: the last ones read.

    Attributes:
        queries: `(batch, heads, rows, dim)`, after their rotation.
        start: position of the first of them; the rest follow it.
        kv_heads: KV heads of the layer.
        scale, softcap: how the model turns products into logits.
        expected: the queries to come, for methods with an `outlook`.
    """

    queries: Tensor
    start: int
    kv_heads: int
    scale: float
    softcap: float | None = None
    expected: Expected | None = None

    @property
    def end(self) -> int:
        """Position after the last query."""
        return self.start + self.queries.shape[2]

    def last(self, rows: int) -> "Window":
        """The same window, its last `rows` queries only."""
        dropped = max(0, self.queries.shape[2] - rows)
        return replace(self, queries=self.queries[:, :, dropped:], start=self.start + dropped)

    def distances(self, bank: Bank, head: int) -> Tensor:
        """How many tokens each row comes after each of one head's entries, `(batch, rows, used)`;
        below 0 for entries ahead of it."""
        asked = torch.arange(self.start, self.end, device=bank.positions.device)
        return asked[:, None] - bank.positions[:, head, None, : bank.used]

    def attention(self, bank: Bank, head: int, keys: Tensor, rows: slice) -> Tensor:
        """Probabilities of some rows over one head's first entries.

        Args:
            head: index into `bank.heads`.
            keys: `(batch, visible, dim)` float32, that head's; those after them lie ahead of all
                the rows.
            rows: which of the window's queries.

        Returns:
            `(batch, heads per KV head, rows, visible)` float32; entries ahead of a row have 0.
        """
        queries = grouped(self.queries[:, :, rows], self.kv_heads)[:, bank.heads[head]]
        queries = queries.float() * self.scale
        logits = torch.matmul(queries.flatten(1, 2), keys.transpose(-1, -2))
        logits = capped(logits, self.softcap).view(*queries.shape[:3], -1)
        asked = torch.arange(self.start + rows.start, self.start + rows.stop, device=keys.device)
        # Entries ascend in position, so only the last few can lie ahead of a row.
        tail = slice(max(0, bank.used - (self.end - self.start - rows.start)), keys.shape[1])
        ahead = bank.positions[:, None, head, None, tail] > asked[:, None]
        logits[..., tail].masked_fill_(ahead, -torch.inf)
        return logits.softmax(-1)


def window_scores(
    bank: Bank,
    window: Window,
    over_queries: Reduce,
    over_heads: Reduce,
    weights: Tensor | None = None,
) -> Tensor:
    """How much attention each entry got from the window: first over rows, then over a KV
    head's query heads.

    Computed a head and a block of rows at a time, so the workspace stays at tens of megabytes.

    Args:
        bank: entries ascending in position, the window's own the last of them.
        weights: `(rows,)` float32, what a row's attention is multiplied by.

    Returns:
        `(batch, heads of the bank, used)` float32.
    """
    count = window.queries.shape[2]
    batch, group = window.queries.shape[0], window.queries.shape[1] // window.kv_heads
    block = max(1, min(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // (bank.used * group * batch)))
    scores = []
    for head in range(len(bank.heads)):
        keys = bank.keys[:, head, : bank.used].float()
        total = keys.new_zeros(batch, group, bank.used)
        for start in range(0, count, block):
            rows = slice(start, min(start + block, count))
            visible = bank.used - (count - rows.stop)
            part = window.attention(bank, head, keys[:, :visible], rows)
            if weights is not None:
                part *= weights[rows, None]
            so_far = total[..., :visible]
            if over_queries == "max":
                torch.maximum(so_far, part.amax(2), out=so_far)
            else:
                so_far += part.sum(2)
        if over_queries == "mean":
            total /= count
        scores.append(_reduce(total, over_heads))
    return torch.stack(scores, 1)


def window_rows(bank: Bank, window: Window) -> Tensor:
    """Where each query of the window looks among the entries that were kept, averaged over a KV
    head's query heads.

    Args:
        bank: entries ascending in position.

    Returns:
        `(batch, heads of the bank, rows, used)` float32.
    """
    rows = slice(0, window.queries.shape[2])
    each = [
        window.attention(bank, head, bank.keys[:, head, : bank.used].float(), rows)
        for head in range(len(bank.heads))
    ]
    return torch.stack(each, 1).mean(2)


def _reduce(scores: Tensor, how: Reduce) -> Tensor:
    if how == "max":
        return scores.amax(1)
    return scores.mean(1) if how == "mean" else scores.sum(1)


def pool(scores: Tensor, kernel: int, kind: Pooling) -> Tensor:
    """Smooth scores `(batch, heads, n)` over `kernel` neighbours, so that spans are kept, not
    single tokens. The kernel shrinks to the largest odd number that fits; 1 changes nothing."""
    n = scores.shape[-1]
    kernel = min(kernel, n if n % 2 else n - 1)
    if kernel <= 1:
        return scores
    function = F.max_pool1d if kind == "max" else F.avg_pool1d
    pooled: Tensor = function(scores, kernel, stride=1, padding=kernel // 2)
    return pooled


def top(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores along the last dimension, ascending; ties go to the
    lower index, which `torch.topk` does not promise."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return best.sort(dim=-1).values
