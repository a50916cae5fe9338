"""The attention function registered with transformers; it passes everything to the engine.

The engine hands itself down as the decoder layer's keyword `kvlite`, so there is no global state
and none of transformers' cache objects in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvlite.model.architectures import architecture
from kvlite.model.latents import over_latents, values_of
from kvlite.model.llama4 import tempered
from kvlite.model.packed_linear import in_bfloat16
from kvlite.ops.device import MANY_ROWS
from kvlite.ops.softmax import Softmax

ATTENTION = "kvlite"


class Attender(Protocol):
    """Runs a layer's attention: takes its queries, keys and values, and has the cached ones."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attention output `(batch, heads, L, dim)` for rotated q and the new, unrepeated
        k and v `(batch, kv heads, L, dim)`."""
        ...


@dataclass(frozen=True)
class Lender:
    """Runs the attention of a layer without keys, over those of another that has the tokens
    already.

    Attributes:
        rotation: cos and sin of the tokens, as the other layer has them.
        over: takes rotated queries, and attends.
    """

    rotation: tuple[Tensor, Tensor]
    over: Callable[[Tensor, Softmax], Tensor]

    def attend(self, q: Tensor, k: Any, v: Any, softmax: Softmax) -> Tensor:
        """As `Attender`, of queries alone."""
        return self.over(q, softmax)


def register_attention() -> None:
    """Make `attn_implementation="kvlite"` known to transformers; harmless to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kvlite: Attender,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    positions: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    sinks = None if s_aux is None else s_aux.float()
    own = architecture(module.config.model_type)
    if positions is not None:
        query = tempered(module, query, positions)
    if own.latent:
        query = over_latents(module, query)
    if own.neighbors:
        width = module.qk_rope_head_dim if own.latent else _turned(query, module.config)
        query, key = (_halves(each, width) for each in (query, key))
    rounded = query.shape[2] >= MANY_ROWS and in_bfloat16(module)
    softmax = Softmax(scaling, softcap, sinks, rounded)
    out = kvlite.attend(query, key, key if own.latent else value, softmax)
    if own.latent:
        out = values_of(module, out)
    return out.transpose(1, 2).contiguous(), None


def _turned(vectors: Tensor, config: Any) -> int:
    share = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return int(vectors.shape[-1] * share)


def _halves(vectors: Tensor, width: int) -> Tensor:
    """Vectors whose neighboring channels were rotated, of the first ones, those of each pair in the
    two halves of these. As queries and keys change alike, their products stay."""
    moving, still = vectors.tensor_split([width], -1)
    return torch.cat([moving[..., ::2], moving[..., 1::2], still], -1)
