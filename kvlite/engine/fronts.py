"""One token looks at a bank whose older entries are computed: they never exist all at once."""

import torch
from torch import Tensor

from kvlite.attention import capped, grouped
from kvlite.cache import Bank


def attend_front(
    q: Tensor, bank: Bank, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Decode attention over what a bank holds, its front a part at a time.

    Args:
        q: `(batch, heads, 1, dim)`.
        scale, softcap: as in `kvlite.attention`.

    Returns:
        output in the shape of q, and the probabilities averaged over a KV head's queries,
        `(batch, kv heads, used)` float32.
    """
    front, held = bank.front, slice(0, bank.own_used)
    assert front is not None
    queries = grouped(q, len(bank.heads))[:, :, :, 0].float() * scale
    near = queries @ bank.own_keys[:, :, held].float().mT
    before, after = near.tensor_split([front.start], -1)
    logits = capped(torch.cat([before, front.dot(queries), after], -1), softcap)
    weights = logits.softmax(-1)
    sizes = [before.shape[-1], bank.in_front, after.shape[-1]]
    first, older, recent = weights.split(sizes, -1)
    out = torch.cat([first, recent], -1) @ bank.own_values[:, :, held].float()
    out += front.weigh(older)
    return out.flatten(1, 2)[:, :, None].to(q.dtype), weights.mean(2)
