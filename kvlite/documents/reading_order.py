"""Lines of text on a page, from boxes with words, in the order in which they are read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

# A gap between columns is at least as wide as a line is high, times this.
_GUTTER = 0.8
# In a column of prose most lines take at least this share of its width; cells of a table do not.
_FILLED = 0.5
# Fewer lines are no column.
_FEWEST = 3


@dataclass(frozen=True)
class Box:
    """Words and where they are, in pixels from the page's upper left corner."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """Of the box."""
        return self.right - self.left

    @property
    def height(self) -> float:
        """Of the box."""
        return self.bottom - self.top


def lines_of(boxes: Sequence[Box]) -> list[str]:
    """The lines, columns of prose one after another, rows of a table whole.

    What crosses the gap between two columns, such as a heading, ends what stands above it.
    """
    gutter = _gutter(boxes)
    if gutter is None:
        return _rows(boxes)
    made, left, right = list[str](), list[Box](), list[Box]()
    for box in sorted(boxes, key=lambda each: each.top):
        if box.right <= gutter:
            left.append(box)
        elif box.left >= gutter:
            right.append(box)
        else:
            made += [*lines_of(left), *lines_of(right), box.text]
            left, right = [], []
    return [*made, *lines_of(left), *lines_of(right)]


def _gutter(boxes: Sequence[Box]) -> float | None:
    """The middle of the widest gap that has a column of prose on both sides; None if there is
    none."""
    gaps = sorted(_gaps(boxes), key=lambda gap: gap[0] - gap[1])
    for start, end in gaps:
        at = (start + end) / 2
        sides = [box for box in boxes if box.right <= at], [box for box in boxes if box.left >= at]
        if all(map(_is_prose, sides)):
            return at
    return None


def _gaps(boxes: Sequence[Box]) -> Iterable[tuple[float, float]]:
    """Where no box is but few wide ones: between the left edges of boxes and the right edges of
    those before them."""
    if not boxes:
        return
    high, across = median(box.height for box in boxes), max(2, len(boxes) // 10)
    widest = sorted(boxes, key=lambda each: -each.width)
    for fewer in range(across + 1):
        end = None
        for box in sorted(widest[fewer:], key=lambda each: each.left):
            if end is not None and box.left - end >= _GUTTER * high:
                yield end, box.left
            end = max(box.right, end or box.right)


def _is_prose(boxes: Sequence[Box]) -> bool:
    if len(boxes) < _FEWEST:
        return False
    across = max(box.right for box in boxes) - min(box.left for box in boxes)
    return median(box.width for box in boxes) >= _FILLED * across


def _rows(boxes: Sequence[Box]) -> list[str]:
    """Boxes at the same height as one line."""
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda each: each.top + each.bottom):
        middle = (box.top + box.bottom) / 2
        last = rows[-1][-1] if rows else None
        if last is not None and last.top < middle < last.bottom:
            rows[-1].append(box)
        else:
            rows.append([box])
    return [" ".join(b.text for b in sorted(row, key=lambda each: each.left)) for row in rows]
