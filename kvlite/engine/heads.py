"""Banks hold some KV heads each: give each bank its heads' part of a layer's tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvlite.cache import Bank, LayerCache
from kvlite.ops.attention import grouped


def over_banks(
    layer: LayerCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Callable[[Bank, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Run `attend` for each bank, and put the heads together again.

    Args:
        q: `(batch, heads, L, dim)`; k, v: `(batch, kv heads, L, dim)`.
        attend: takes a bank and its heads' q, k, v; returns output in the shape of its q.

    Returns:
        `(batch, heads, L, dim)`.
    """
    if len(layer.banks) == 1 and not layer.like:
        return attend(layer.banks[0], q, k, v)
    out = torch.empty_like(q)
    outs = grouped(out, k.shape[1])
    for bank in layer.banks:
        heads = list(bank.heads)
        queries = grouped(q, k.shape[1])[:, heads].flatten(1, 2)
        outs[:, heads] = grouped(attend(bank, queries, k[:, heads], v[:, heads]), len(heads))
    for head, other in layer.like.items():
        outs[:, head] = outs[:, other]
    return out
