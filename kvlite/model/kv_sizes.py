"""How large keys and values of a model's layers are, and which layers have windows."""

from collections.abc import Iterable
from typing import Any

from kvlite.cache import KVSize
from kvlite.model.architectures import UNTESTED, architecture
from kvlite.model.window import LocalWindow


def sizes_and_windows(
    config: Any, module: Any, numbers: Iterable[int]
) -> tuple[tuple[KVSize, ...], tuple[LocalWindow | None, ...]]:
    """Per layer with attention (`numbers`) what it keeps of a token; and its window, or None. By
    transformers' config; where the architecture is untested, by its model on the meta device.
    Raises ModelError as `untested.attention_sizes`; ValueError if sizes are impossible, or layers
    that see alike differ."""
    if architecture(config.model_type) is UNTESTED:
        from kvlite.model.untested import attention_sizes

        found = attention_sizes(module)
        sizes = tuple(size for size, _ in found)
        windows = tuple(None if length is None else LocalWindow(length) for _, length in found)
    else:
        by_layer = _windows(config)
        sizes = tuple(_kv_size(config, number) for number in numbers)
        windows = tuple(by_layer[number] for number in numbers)
    slides = [window is not None for window in windows]
    if len({*zip(sizes, slides, strict=True)}) > len({*slides}):
        raise ValueError("layers that see as much as each other have keys of different sizes")
    return sizes, windows


def _kv_size(config: Any, number: int) -> KVSize:
    if architecture(config.model_type).latent:
        return KVSize(1, config.kv_lora_rank + config.qk_rope_head_dim, latent=True)
    own = config.per_layer_config[number]
    dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    heads = own.num_key_value_heads or own.num_attention_heads
    if own.num_attention_heads % heads:
        raise ValueError(f"{own.num_attention_heads} heads cannot share {heads} KV heads")
    return KVSize(heads, dim)


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
