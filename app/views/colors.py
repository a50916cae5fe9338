"""Colours of what takes memory: the same thing has the same one wherever it is drawn."""

_KINDS = {
    "weights": "weights",
    "a weight on its way": "passing",
    "KV cache": "kv-cache",
    "KV, full attention": "kv",
    "KV, sliding windows": "kv-windows",
    "one layer's KV": "one-layer",
    "hidden states": "hidden",
    "activations and scores": "work",
    "other tensors": "work",
    "recall index": "index",
    "recall store": "tier",
    "checkpoints": "checkpoints",
    "this program": "program",
    "allocator": "allocator",
    "free": "free",
}


def color_of(name: str) -> str:
    """The class that a part's colour goes by."""
    return _KINDS.get(name, "others")
