"""How large keys and values of a model's layers are, and which layers have windows."""

from collections.abc import Iterable
from typing import Any

from kvlite.model.architectures import UNTESTED, architecture
from kvlite.model.window import LocalWindow


def sizes_and_windows(
    config: Any, module: Any, numbers: Iterable[int]
) -> tuple[tuple[tuple[int, int], ...], tuple[LocalWindow | None, ...]]:
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
        windows = (None if size is None else LocalWindow(size) for *_, size in found)
        return tuple(each[:2] for each in found), tuple(windows)
    by_layer = _windows(config)
    sizes = tuple(_kv_size(config, number) for number in numbers)
    return sizes, tuple(by_layer[number] for number in numbers)


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
    sizes: Iterable[tuple[int, int]], windows: Iterable[LocalWindow | None]
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


def _windows(config: Any) -> tuple[LocalWindow | None, ...]:
    """Per layer; a window that is no shorter than the context never slides, and counts as none."""
    own = architecture(config.model_type)
    short_sighted, key = own.short_sight
    size: int | None = getattr(config, key, None)
    layers: int = config.num_hidden_layers
    if not size or size >= config.max_position_embeddings:
        return (None,) * layers
    window = LocalWindow(size, own.chunked)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == short_sighted else None for kind in kinds)
