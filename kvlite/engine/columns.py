"""A chunk that looks only at some columns of what lies before it, and at what is near."""

from dataclasses import replace

import torch
from torch import Tensor

from kvlite.attention import attend, attend_causal, merge
from kvlite.cache import Bank
from kvlite.methods.base import Columns
from kvlite.methods.scores import Window, top, window_scores


def attend_columns(
    q: Tensor, bank: Bank, first: int, columns: Columns, *, scale: float, softcap: float | None
) -> Tensor | None:
    """Attention of a chunk over chosen columns, what is near, and itself causally.

    Source: "MInference 1.0", section 3.2; see `kvlite.methods.minference`.

    Args:
        q: `(batch, heads, L, dim)`, of the bank's heads; their entries are its last.
        bank: entries ascending in position.
        first: position of the first query; the rest follow it.

    Returns:
        `(batch, heads, L, dim)`; None where the chunk is to look at everything.
    """
    length = q.shape[2]
    far = bank.used - length - columns.near
    if far <= columns.count or length <= columns.observed:
        return None
    own = replace(bank, heads=tuple(range(len(bank.heads))))
    window = Window(q, first, len(own.heads), scale, softcap).last(columns.observed)
    voted = window_scores(own, window, "sum", "sum")[..., :far]
    voted[..., : columns.sinks] = torch.inf
    slots = top(voted, columns.count)
    index = slots[..., None].expand(-1, -1, -1, q.shape[-1])
    keys, values = bank.keys[:, :, : bank.used], bank.values[:, :, : bank.used]
    chosen = keys[:, :, :far].gather(2, index), values[:, :, :far].gather(2, index)
    further = attend(q, *chosen, scale=scale, softcap=softcap, causal=False)
    near = keys[:, :, far:], values[:, :, far:]
    return merge(further, attend_causal(q, *near, scale=scale, softcap=softcap))
