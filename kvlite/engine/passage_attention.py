"""How much attention tokens paid to passages of what was read, from the queries they had."""

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.cache.query_log import QueryLog
from kvlite.model.shape import ModelShape
from kvlite.ops.attention import grouped, scaled_logits
from kvlite.ops.heads import of_heads

# Which layers are watched, from first (0) to last (1), of those that see everything.
WATCHED = (0.5, 0.6, 0.7, 0.8)
# Attention numbers held at a time.
AT_ONCE = 2**23


def watched(shape: ModelShape) -> dict[int, QueryLog]:
    """Empty logs for the layers whose queries tell what an answer came from."""
    full = shape.full_layers
    return {full[int(part * len(full))]: QueryLog() for part in WATCHED if full}


@torch.inference_mode()
def passage_attention(
    layer: LayerCache, log: QueryLog, tokens: range, owner: Tensor, passages: int
) -> Tensor:
    """The most attention that any of a layer's tokens paid to each passage.

    Args:
        layer: whose entries are attended to, on any device.
        log: the tokens' queries.
        tokens: positions; those that the log does not have, or no longer, are left out.
        owner: `(seen,)` int64 on the log's device, the passage that each position belongs to;
            `passages` for none.

    Returns:
        `(heads, passages)` float32, zeros if the log has none of the tokens; heads that share
        others' entries are left out.
    """
    positions, queries = log.of(tokens)
    peaks, kv_heads = [], layer.kv_heads
    for group in layer.head_groups:
        q = of_heads(grouped(queries, kv_heads), group.asking_heads).flatten(1, 2)
        softmax = log.softmax.of_heads(group.asking_heads, kv_heads)
        keys = group.keys[:, :, : group.used].to(q.device)
        at = group.positions[0, :, : group.used].to(q.device).long()
        peak = q.new_zeros(q.shape[1], passages + 1, dtype=torch.float32)
        block = max(1, AT_ONCE // max(1, q.shape[1] * group.used))
        for first in range(0, q.shape[2], block):
            rows = slice(first, first + block)
            found = scaled_logits(q[:, :, rows], keys, softmax)
            later = at[:, None] > positions[rows, None]
            found.masked_fill_(later[None, :, None], float("-inf"))
            attention = softmax.probabilities(found)[0]
            own = owner[at][:, None, None].expand_as(attention)
            sums = attention.new_zeros(*attention.shape[:3], passages + 1)
            sums.scatter_add_(3, own, attention)
            torch.maximum(peak, sums.flatten(0, 1).amax(1), out=peak)
        peaks.append(peak[:, :passages])
    return torch.cat(peaks)
