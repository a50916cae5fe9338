"""Attention of a chunk to some columns of the earlier entries, and to those nearby."""

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup
from kvlite.cache.head_group import wide
from kvlite.methods.capabilities import VerticalSlash
from kvlite.methods.scores import Window, top, window_scores
from kvlite.ops.attention import attend, attend_causal, merged
from kvlite.ops.softmax import Softmax


def attend_vertical_slash(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    first: int,
    columns: VerticalSlash,
    softmax: Softmax,
) -> Tensor | None:
    """Attention of a chunk over chosen columns, what is near, and itself causally.

    Source: "MInference 1.0", section 3.2; see `kvlite.methods.minference`.

    Args:
        q: `(batch, heads, L, dim)`.
        keys, values: `(batch, kv heads, N, dim)`, ascending in position, the chunk's own the last.
        positions: `(batch, kv heads, N)` int32.
        first: position of the first query; the rest follow it.

    Returns:
        `(batch, heads, L, dim)`; None where the chunk is to look at everything.
    """
    length, used = q.shape[2], keys.shape[2]
    far = used - length - columns.near
    if far <= columns.count or length <= columns.observed:
        return None
    head_group = KVHeadGroup(tuple(range(keys.shape[1])), keys, values, positions, used=used)
    window = Window(q, first, len(head_group.heads), softmax).last(columns.observed)
    voted = window_scores(head_group, window, "sum", "sum")[..., :far]
    voted[..., : columns.sinks] = torch.inf
    slots = top(voted, columns.count)
    index = wide(slots, keys)
    chosen = keys[:, :, :far].gather(2, index), values[:, :, :far].gather(2, index)
    further = attend(q, *chosen, softmax, causal=False)
    near = keys[:, :, far:], values[:, :, far:]
    return softmax.with_sinks(*merged(further, attend_causal(q, *near, softmax)))[0]
