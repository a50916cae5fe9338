"""How large keys and values of a model's layers are, and how much each layer sees."""

from collections.abc import Iterable
from typing import Any

from kvlite.model.architectures import UNTESTED, architecture


def sizes_and_windows(
    config: Any, module: Any, numbers: Iterable[int]
) -> tuple[tuple[tuple[int, int], ...], tuple[int | None, ...]]:
    """Per layer the number of KV heads and the dimension of one; and its window, or None.

    Args:
        config: transformers'.
        module: its model on the meta device, which is asked where the architecture is untested.
        numbers: of the layers with attention.

    Raises:
        ModelError: as of `untested.attention_sizes`.
        ValueError: the sizes are impossible.
    """
    if architecture(config.model_type) is UNTESTED:
        from kvlite.model.untested import attention_sizes

        found = attention_sizes(module)
        return tuple(each[:2] for each in found), tuple(each[2] for each in found)
    windows = _windows(config)
    sizes = tuple(_kv_size(config, number) for number in numbers)
    return sizes, tuple(windows[number] for number in numbers)


def sight(window: int, position: int, *, aligned: bool) -> int:
    """The most entries, its own included, that a token sees through a window; where windows are
    `aligned`, those since the last multiple of its length."""
    return position % window + 1 if aligned else window


def _kv_size(config: Any, number: int) -> tuple[int, int]:
    if architecture(config.model_type).latent:
        return 1, config.kv_lora_rank + config.qk_rope_head_dim
    own = config.per_layer_config[number]
    dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    heads = own.num_key_value_heads or own.num_attention_heads
    if own.num_attention_heads % heads:
        raise ValueError(f"{own.num_attention_heads} heads cannot share {heads} KV heads")
    return heads, dim


def sizes_by_sight(
    sizes: Iterable[tuple[int, int]], windows: Iterable[int | None]
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The size of layers that see everything, and of those with a window where that is another.
    Raises ValueError if layers that see alike differ."""
    full, sliding = set[tuple[int, int]](), set[tuple[int, int]]()
    for size, window in zip(sizes, windows, strict=True):
        (full if window is None else sliding).add(size)
    full = full or sliding
    if len(full) > 1 or len(sliding) > 1:
        raise ValueError("layers that see as much as each other have keys of different sizes")
    return max(full), max(sliding) if sliding - full else None


def _windows(config: Any) -> tuple[int | None, ...]:
    """Per layer; a window that is no shorter than the context never slides, and counts as none."""
    short_sighted, key = architecture(config.model_type).short_sight
    window: int | None = getattr(config, key, None)
    layers: int = config.num_hidden_layers
    if not window or window >= config.max_position_embeddings:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == short_sighted else None for kind in kinds)
