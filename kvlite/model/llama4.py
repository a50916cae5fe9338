"""Llama 4: layers without rotary positions scale queries by where these are.

transformers asks its cache how far a whole batch is, which the engine neither has nor could say of
conversations that take a step together. So that scale is left at 1, and queries get theirs here.

Sources: "Scalable-Softmax Is Superior for Attention", section 2.2; transformers'
`Llama4TextAttention`.
"""

from typing import Any

import torch
from torch import Tensor


class _Nowhere:
    """Stands for transformers' cache, keeps nothing, and says that tokens come so early that their
    queries are not scaled."""

    def __init__(self, positions: Tensor) -> None:
        self.seen = -1 - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, layer: int) -> Tensor:
        return self.seen

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return keys, values


def tell_positions(layer: Any) -> None:
    """Let transformers' decoder layer, or its attention where that is called by itself, hand the
    attention function the `positions` of the tokens that the engine gives them."""
    for module in (layer, layer.self_attn):
        module.register_forward_pre_hook(_told, with_kwargs=True)


def _told(
    module: Any, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # transformers runs its model itself, or the layer has told its attention.
    if "kvlite" not in given or "position_ids" not in given:
        return args, given
    positions: Tensor = given["position_ids"]
    return args, {**given, "positions": positions, "past_key_values": _Nowhere(positions)}


def tempered(attention: Any, queries: Tensor, positions: Tensor) -> Tensor:
    """Queries `(batch, heads, L, dim)` as attention takes them at positions `(batch, L)`."""
    if attention.use_rope or not attention.attn_temperature_tuning:
        return queries
    floors = ((positions.float() + 1) / attention.floor_scale).floor()
    scales = floors.log1p() * attention.attn_scale + 1
    scaled: Tensor = (queries * scales[:, None, :, None]).to(queries.dtype)
    return scaled
