"""Attention over latents (MLA): a token's keys and values of all heads are made of one vector.

What is kept of a token is that vector and, before it, the rotated part that all heads share: one KV
head, whose keys are also its values. The matrix that would make each head's keys of latents is
multiplied into the queries, the one for values into what attention gives. So blocks, methods,
recall and quantized entries know no other kind of attention, and a key turns to another position by
its first channels.

Source: "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
section 2.1 and appendix C.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvlite.errors import ModelError


def keep_latents(attention: Any, function: str) -> None:
    """Let transformers' attention module hand latents to the attention function of that name, where
    it would make each head's keys and values of them first. Raises ModelError if a checkpoint has
    quantized what makes keys and values of latents."""
    weight = getattr(attention.kv_b_proj, "weight", None)
    if weight is None or weight.dtype.itemsize < 2:
        raise ModelError(
            "this model's kv_b_proj, which is multiplied into others, is quantized in its files: "
            "use the model they were made from, with --weights nf4"
        )
    attention.expand_kv = partial(_latents, attention, function)


def _latents(
    attention: Any, function: str, latents: Tensor, turned: Tensor
) -> tuple[Tensor, Tensor]:
    if attention.config._attn_implementation != function:
        expanded: tuple[Tensor, Tensor] = type(attention).expand_kv(attention, latents, turned)
        return expanded
    entries = torch.cat([turned, latents], -1)
    return entries, entries


def over_latents(attention: Any, queries: Tensor) -> Tensor:
    """Queries `(batch, heads, L, dim)`, their rotated part last, as queries of what is kept."""
    still, turned = queries.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], -1)
    keys, _ = _expanding(attention)
    return torch.cat([turned, still @ keys], -1)


def values_of(attention: Any, out: Tensor) -> Tensor:
    """Attention output over what is kept, as over each head's values: `(batch, heads, L, dim)`."""
    _, values = _expanding(attention)
    return out[..., attention.qk_rope_head_dim :] @ values.mT


def _expanding(attention: Any) -> tuple[Tensor, Tensor]:
    """The matrices that make keys, the part that is not rotated, and values of latents, each
    `(heads, dim, latent size)`."""
    weight = attention.kv_b_proj.weight
    sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
    keys, values = weight.view(attention.num_heads, sum(sizes), -1).split(sizes, 1)
    return keys, values
