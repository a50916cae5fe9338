"""Bars of what takes memory: the same thing has the same color wherever it is drawn."""

from collections.abc import Iterable
from html import escape

from kvlite.config.units import readable

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
    """The CSS class that gives a part its color."""
    return _KINDS.get(name, "others")


def bar_html(parts: Iterable[tuple[str, int]], scale: int, label: str, more: str = "") -> str:
    """Names and bytes side by side, on a scale of bytes; `label` is the bar in words, for screen
    readers, and `more` is HTML that is drawn over it."""
    cells = "".join(
        f'<i class="{color_of(name)}" style="width:{100 * nbytes / scale:.3f}%" '
        f'title="{escape(name)}: {readable(nbytes)}"></i>'
        for name, nbytes in parts
        if nbytes
    )
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{cells}{more}</div>'
