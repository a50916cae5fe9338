"""Shares of a whole as characters."""

from collections.abc import Sequence

_FULL, _EMPTY = "█▓▒▞▚▤▥", "░"
_ASCII_FULL, _ASCII_EMPTY = "#=+*%@o", "."


def marks(ascii_only: bool) -> str:
    """A character for each part, in order; they repeat where there are more parts."""
    return _ASCII_FULL if ascii_only else _FULL


def bar(parts: Sequence[tuple[str, float]], width: int, *, ascii_only: bool = False) -> str:
    """Parts side by side, `width` characters in all; what is left over is free.

    What is there at all gets a character, as long as there are any.

    Args:
        parts: names, and shares of the whole, 0 to 1.
    """
    shown, kinds, done = "", marks(ascii_only), 0.0
    for number, (_, share) in enumerate(parts):
        done += share
        cells = max(int(share > 0), round(done * width) - len(shown))
        shown += kinds[number % len(kinds)] * min(cells, width - len(shown))
    empty = _ASCII_EMPTY if ascii_only else _EMPTY
    return shown + empty * (width - len(shown))
