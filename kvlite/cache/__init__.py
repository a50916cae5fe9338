"""The KV cache: head groups of KV heads, layers, all layers.

Only modules that need tensors import torch; parsing the bits that a user asked for does not.
"""

from typing import TYPE_CHECKING, Any

from kvlite.cache.bits import KVBits, parse_kv_bits
from kvlite.cache.kv_size import KVSize

if TYPE_CHECKING:
    from kvlite.cache.cache import KVCache
    from kvlite.cache.head_group import KVHeadGroup
    from kvlite.cache.layer import LayerCache
    from kvlite.cache.segment import CompressedSegment
    from kvlite.cache.selection import GroupLength, Selection

__all__ = [
    "CompressedSegment",
    "GroupLength",
    "KVBits",
    "KVCache",
    "KVHeadGroup",
    "KVSize",
    "LayerCache",
    "Selection",
    "parse_kv_bits",
]

_HOMES = {
    "KVHeadGroup": "head_group",
    "CompressedSegment": "segment",
    "KVCache": "cache",
    "LayerCache": "layer",
    "GroupLength": "selection",
    "Selection": "selection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvlite.cache' has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(f"kvlite.cache.{_HOMES[name]}"), name)
    return found
