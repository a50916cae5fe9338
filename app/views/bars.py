"""Bars of what takes memory. The style sheet gives each kind its color."""

from collections.abc import Iterable
from html import escape

from kvlite.config.units import readable


def bar_html(parts: Iterable[tuple[str, int]], scale: int, label: str, more: str = "") -> str:
    """Names and bytes side by side, on a scale of bytes; `label` is the bar in words, for screen
    readers, and `more` is HTML that is drawn over it."""
    cells = "".join(
        f'<i data-kind="{escape(name)}" style="width:{100 * nbytes / scale:.3f}%" '
        f'title="{escape(name)}: {readable(nbytes)}"></i>'
        for name, nbytes in parts
        if nbytes
    )
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{cells}{more}</div>'
