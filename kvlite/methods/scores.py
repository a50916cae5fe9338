"""Which entries matter: attention from an observation window, pooled, and its top k.

Source: "SnapKV: LLM Knows What You are Looking for Before Generation", section 4; the rules for
grouped queries are ours (docs/architecture.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvlite.methods.placement import ON_DEVICE, Logits, ScoringBackend
from kvlite.methods.types import KVHeadGroup, Tensor
from kvlite.ops.softmax import Softmax

if TYPE_CHECKING:
    import torch

Reduce = Literal["sum", "mean", "max"]
Pooling = Literal["max", "avg"]

ELEMENTS_AT_ONCE, ROWS_AT_ONCE = 1 << 22, 128
KEY_ELEMENTS_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class Window:
    """The last queries read, which a layer's entries are scored by.

    Attributes:
        queries: `(batch, heads, rows, dim)`, rotated.
        start: position of the first query; the others follow it.
        softmax: how the layer turns products into attention.
        backend: where their attention becomes a choice.
    """

    queries: Tensor
    start: int
    kv_heads: int
    softmax: Softmax
    backend: ScoringBackend = ON_DEVICE

    @property
    def end(self) -> int:
        """The position after the last query."""
        return self.start + self.queries.shape[2]

    def last(self, rows: int) -> "Window":
        """The last `rows` queries alone."""
        dropped = max(0, self.queries.shape[2] - rows)
        return replace(self, queries=self.queries[:, :, dropped:], start=self.start + dropped)

    def first(self, rows: int) -> "Window":
        """The first `rows` queries alone."""
        return replace(self, queries=self.queries[:, :, :rows])

    @property
    def place(self) -> "torch.device":
        """Where `blocks` are."""
        return self.backend.place(self.queries.device)

    def to_scoring_device(self, tensor: Tensor) -> Tensor:
        """A head group's tensor, at the place where `blocks` are."""
        return self.backend.to_scoring_device(tensor)

    def distances(self, positions: Tensor) -> Tensor:
        """How many tokens each row is behind entries at `positions` (batch, n): `(batch, rows, n)`,
        negative for entries ahead of it."""
        import torch

        asked = torch.arange(self.start, self.end, dtype=positions.dtype, device=positions.device)
        return asked[:, None] - positions[:, None]

    def blocks(
        self, head_group: KVHeadGroup, head: int, *, complete: bool = True
    ) -> Iterator[tuple[slice, Tensor]]:
        """Attention to one head's entries, a block of rows at a time, so that the workspace stays
        at tens of megabytes.

        Args:
            head_group: entries ascending in position.
            head: index into `head_group.heads`.
            complete: whether the window's own entries are all there, as the last of the head group.

        Yields:
            Which rows, and their probabilities `(batch, heads per KV head, rows, visible)` float32,
            up to the last entry that a row of the block sees; entries ahead of a row have 0.
        """
        keys, count = head_group.keys[:, head, : head_group.used], self.queries.shape[2]
        if not self.backend.frugal:
            keys = keys.float()
        batch, group = self.queries.shape[0], self.queries.shape[1] // self.kv_heads
        size = max(1, min(ROWS_AT_ONCE, ELEMENTS_AT_ONCE // (head_group.used * group * batch)))
        spans = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        if keys.is_meta:  # the last two take most
            spans = spans[-2:]
        ahead = [count - rows.stop if complete else 0 for rows in spans]
        attention = self.backend.attention(
            self._logits(head_group, head, keys[:, : head_group.used - later], rows)
            for rows, later in zip(spans, ahead, strict=True)
        )
        for rows in spans:  # zip would hold a block until the next is there
            yield rows, next(attention)

    def _logits(self, head_group: KVHeadGroup, head: int, keys: Tensor, rows: slice) -> Logits:
        """Logits of some rows over `keys` (batch, visible, dim), the first of a head's."""
        import torch

        from kvlite.ops.attention import grouped

        queries = grouped(self.queries[:, :, rows], self.kv_heads)[:, head_group.heads[head]]
        shape = *queries.shape[:3], keys.shape[1]
        softmax = self.softmax.of_heads([head_group.heads[head]], self.kv_heads)
        queries = (queries.float() * softmax.scale).flatten(1, 2)
        asked = torch.arange(self.start + rows.start, self.start + rows.stop, device=keys.device)
        # Entries ascend in position, so only the last few can lie ahead of a row.
        early = max(0, head_group.used - (self.end - self.start - rows.start))
        size = max(1, KEY_ELEMENTS_AT_ONCE // (keys.shape[0] * keys.shape[2]))

        def parts() -> Iterator[tuple[slice, Tensor]]:
            starts = range(0, shape[3], size)
            for at in starts[:2] if keys.is_meta else starts:
                part = slice(at, min(at + size, shape[3]))
                logits = torch.matmul(queries, keys[:, part].float().transpose(-1, -2))
                logits = softmax.capped(logits).view(*shape[:3], -1)
                late = slice(max(at, early), part.stop)
                if late.start < late.stop:
                    ahead = head_group.positions[:, None, head, None, late] > asked[:, None]
                    logits[..., late.start - at :].masked_fill_(ahead, -torch.inf)
                yield part, logits

        return Logits(shape, parts(), softmax)


def window_scores(
    head_group: KVHeadGroup,
    window: Window,
    over_queries: Reduce,
    over_heads: Reduce,
    weights: "Tensor | None" = None,
) -> Tensor:
    """How much attention each entry got from the window, reduced over rows, then over a KV head's
    query heads.

    Args:
        head_group: entries ascending in position, the window's own the last of them.
        weights: `(rows,)` float32 at the window's place, which a row's attention is multiplied by.

    Returns:
        `(batch, heads of the group, used)` float32, at the window's place.
    """
    import torch

    if weights is None and window.place == window.queries.device and window.softmax.in_tiles:
        return _scores_in_tiles(head_group, window, over_queries, over_heads)
    batch, queried, count = window.queries.shape[:3]
    group, place = queried // window.kv_heads, window.place
    scores = torch.empty(batch, len(head_group.heads), head_group.used, device=place)
    for head in _looked_at(head_group):
        total = torch.zeros(batch, group, head_group.used, device=place)
        for rows, part in window.blocks(head_group, head):
            if weights is not None:
                part *= weights[rows, None]
            so_far = total[..., : part.shape[3]]
            if over_queries == "max":
                torch.maximum(so_far, part.amax(2), out=so_far)
            else:
                so_far += part.sum(2)
            del part  # before the next block is formed
        if over_queries == "mean":
            total /= count
        scores[:, head] = _reduce(total, over_heads)
    return scores


def _scores_in_tiles(
    head_group: KVHeadGroup, window: Window, over_queries: Reduce, over_heads: Reduce
) -> Tensor:
    """As `window_scores`, on CUDA: no row of attention is ever whole."""
    from kvlite.ops.attention import attention_of, causal_lse, grouped
    from kvlite.ops.heads import of_heads

    heads, keys = head_group.heads, head_group.keys[:, :, : head_group.used]
    queries = of_heads(grouped(window.queries, window.kv_heads), heads).flatten(1, 2)
    softmax, highest = window.softmax.of_heads(heads, window.kv_heads), over_queries == "max"
    lse = causal_lse(queries, keys, softmax)
    scores = attention_of(queries, keys, lse, softmax, causal=True, highest=highest)
    if over_queries == "mean":
        scores /= queries.shape[2]
    return _reduce(grouped(scores, len(heads)).transpose(1, 2), over_heads)


def window_rows(head_group: KVHeadGroup, window: Window) -> Tensor:
    """Attention of each query of the window to entries ascending in position, averaged over a KV
    head's query heads: `(batch, heads of the group, rows, used)` float32, at the window's place."""
    import torch

    shape = window.queries.shape[0], len(head_group.heads), window.queries.shape[2], head_group.used
    each = torch.empty(shape, device=window.place)
    for head in _looked_at(head_group):
        for rows, part in window.blocks(head_group, head, complete=False):
            each[:, head, rows] = part.mean(1)
    return each


def _looked_at(head_group: KVHeadGroup) -> range:
    """Indices of a head group's heads; of meta tensors, two stand for all."""
    heads = len(head_group.heads)
    return range(min(2, heads) if head_group.residual_keys.is_meta else heads)


def _reduce(scores: Tensor, how: Reduce) -> Tensor:
    if how == "max":
        return scores.amax(1)
    return scores.mean(1) if how == "mean" else scores.sum(1)


def pool(scores: Tensor, kernel: int, kind: Pooling) -> Tensor:
    """Smooth scores `(batch, heads, n)` over `kernel` neighbors, so that spans are kept, not
    single tokens. The kernel shrinks to the largest odd number that fits; 1 changes nothing."""
    import torch.nn.functional as F

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
