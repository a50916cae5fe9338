"""What has been read, as keys and values: banks of KV heads, one layer, all layers."""

from kvlite.cache.bank import Bank
from kvlite.cache.bits import KVBits, parse_kv_bits
from kvlite.cache.cache import KVCache
from kvlite.cache.front import Front
from kvlite.cache.layer import LayerCache
from kvlite.cache.selection import Line, Selection

__all__ = [
    "Bank",
    "Front",
    "KVBits",
    "KVCache",
    "LayerCache",
    "Line",
    "Selection",
    "parse_kv_bits",
]
