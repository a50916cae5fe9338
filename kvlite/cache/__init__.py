"""What has been read, as keys and values: banks of KV heads, one layer, all layers."""

from kvlite.cache.bank import Bank
from kvlite.cache.cache import KVCache, LayerCache, Line, Selection
from kvlite.cache.front import Front

__all__ = ["Bank", "Front", "KVCache", "LayerCache", "Line", "Selection"]
