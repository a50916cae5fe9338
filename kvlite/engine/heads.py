"""Head groups hold some KV heads each: give each head group its heads' part of a layer's
tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache
from kvlite.ops.attention import grouped
from kvlite.ops.heads import of_heads, put_heads
from kvlite.ops.softmax import Softmax


def over_head_groups(
    layer: LayerCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    attend: Callable[[KVHeadGroup, Tensor, Tensor, Tensor, Softmax], Tensor],
) -> Tensor:
    """Run `attend` for each head group, and put the heads together again.

    Args:
        q: `(batch, heads, L, dim)`; k, v: `(batch, kv heads, L, dim)`.
        softmax: of all heads.
        attend: takes a head group and its heads' q, k, v and softmax; returns output in the shape
            of its q.

    Returns:
        `(batch, heads, L, dim)`.
    """
    if layer.uniform:
        return attend(layer.head_groups[0], q, k, v, softmax)
    out = torch.empty_like(q)
    outs = grouped(out, k.shape[1])
    for head_group in layer.head_groups:
        heads, asking = head_group.heads, head_group.asking_heads
        queries = of_heads(grouped(q, k.shape[1]), asking).flatten(1, 2)
        given = of_heads(k, asking), of_heads(v, heads), softmax.of_heads(asking, k.shape[1])
        own = attend(head_group, queries, *given)
        put_heads(outs, heads, grouped(own, len(heads)))
    for head, other in layer.head_alias.items():
        outs[:, head] = outs[:, other]
    return out


def over_what_is_held(
    layer: LayerCache,
    q: Tensor,
    softmax: Softmax,
    attend: Callable[[KVHeadGroup, Tensor, Softmax], Tensor],
) -> Tensor:
    """As `over_head_groups`, for queries whose tokens are in the layer already."""

    def over(head_group: KVHeadGroup, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        return attend(head_group, q, softmax)

    nothing = q[:, : layer.kv_heads]
    return over_head_groups(layer, q, nothing, nothing, softmax, over)
