"""Lines of text on a page, from boxes with words, in the order in which they are read."""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

# A gap between columns is at least as wide as a line is high, times this.
GUTTER = 0.8
# In a column of prose most lines take at least this share of its width, and are so many times as
# wide as high; cells of a table are not.
_FILLED, _LONG = 0.5, 8
# A capital at the beginning of a chapter is so many times as high as its line.
_TALL = 1.8
# Fewer lines are no column.
_FEWEST = 3


@dataclass(frozen=True)
class Box:
    """Words and where they are, from the page's upper left corner."""

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
    boxes = _with_capitals(boxes)
    gutter, rows = _gutter(boxes), _rows(boxes)
    if gutter is None:
        return [_line(row) for row in rows]
    made, wide = list[str](), [_FILLED * _across(side) for side in _sides(boxes, gutter)]

    def read(rows: Sequence[Sequence[Box]]) -> list[str]:
        sides = _sides([box for row in rows for box in row], gutter)
        full = [max(map(_filled, _rows(side)), default=0) for side in sides]
        if all(sides) and (full[0] < wide[0] or full[1] < wide[1]):
            return [_line(row) for row in rows]
        return [line for side in sides for line in lines_of(side)]

    above = list[Sequence[Box]]()
    for row in rows:
        if any(box.left < gutter < box.right for box in row):
            made += [*read(above), _line(row)]
            above = []
        else:
            above.append(row)
    return [*made, *read(above)]


def _with_capitals(boxes: Sequence[Box]) -> list[Box]:
    """Put letters as high as several lines, as chapters begin with, before the rest of their
    word."""
    made, tall = list(boxes), _TALL * _height(boxes) if boxes else 0
    for capital in (each for each in boxes if each.height > tall):
        if len(capital.text) > 1 or not capital.text.isupper():
            continue
        for at, other in enumerate(made):
            beside = 0 <= other.left - capital.right < other.height and other.text[0].islower()
            if beside and other.height < capital.height / _TALL and _begins(other, capital):
                made[at] = replace(other, text=capital.text + other.text, left=capital.left)
                made.remove(capital)
                break
    return made


def _begins(line: Box, capital: Box) -> bool:
    """Whether a line is beside the upper end of a capital."""
    return abs(line.top - capital.top) < line.height / 2


def is_leftward(text: str) -> bool:
    """Whether a text is written from right to left, at least in part."""
    return any(c > "\u0590" and unicodedata.bidirectional(c) in ("R", "AL") for c in text)


def _sides(boxes: Sequence[Box], gutter: float) -> tuple[list[Box], list[Box]]:
    left = [box for box in boxes if box.right <= gutter]
    return left, [box for box in boxes if box.left >= gutter]


def _gutter(boxes: Sequence[Box], *, within: bool = False) -> float | None:
    """The middle of the gap, the fewest boxes across it, that has columns of prose on both sides;
    None if there is none. Within a column there are no others."""
    tried = set[float]()
    for at in _gaps(boxes):
        if at not in tried and _are_columns(_sides(boxes, at), within):
            return at
        tried.add(at)
    return None


def _gaps(boxes: Sequence[Box]) -> Iterable[float]:
    """The middles of gaps that no box or only few go across, the emptiest and widest first."""
    if len(boxes) < 2 * _FEWEST:
        return
    wide, most = GUTTER * _height(boxes), max(2, len(boxes) // 10)
    begins, ends = [(box.left, 1) for box in boxes], [(box.right, -1) for box in boxes]
    edges = sorted(begins + ends)
    depths = list(accumulate(step for _, step in edges))
    for across in range(most + 1):
        found, start = list[tuple[float, float]](), math.inf
        for (at, step), depth in zip(edges, depths, strict=True):
            if step < 0 and depth == across:
                start = at
            elif step > 0 and depth == across + 1:
                found += [(start - at, (start + at) / 2)] if at - start >= wide else []
        yield from (middle for _, middle in sorted(found))


def _are_columns(sides: Sequence[Sequence[Box]], within: bool) -> bool:
    """Whether both have lines of prose, or columns of it, and one has almost nothing else."""
    shares = list[float]()
    for side in sides:
        long = [box for box in side if box.width >= _LONG * box.height]
        if len(long) < _FEWEST:
            return False
        wide, rows = _FILLED * _across(side), _rows(side)
        full = [row for row in rows if _filled(row) >= wide]
        if 2 * len(full) < len(rows) and not within and _gutter(side, within=True) is not None:
            full = rows
        if len(full) < _FEWEST:
            return False
        shares.append(len(full) / len(rows))
    return max(shares) >= 0.5


def _filled(row: Sequence[Box]) -> float:
    return sum(box.width for box in row)


def _height(boxes: Sequence[Box]) -> float:
    return median(box.height for box in boxes)


def _across(boxes: Sequence[Box]) -> float:
    return max(box.right for box in boxes) - min(box.left for box in boxes)


def _rows(boxes: Sequence[Box]) -> list[list[Box]]:
    """Boxes at the same height together."""
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda each: each.top + each.bottom):
        middle = (box.top + box.bottom) / 2
        last = rows[-1][-1] if rows else None
        if last is not None and last.top < middle < last.bottom:
            rows[-1].append(box)
        else:
            rows.append([box])
    return rows


def _line(row: Sequence[Box]) -> str:
    leftward = 2 * sum(is_leftward(box.text) for box in row) > len(row)
    ordered = sorted(row, key=lambda box: -box.right if leftward else box.left)
    return " ".join(box.text for box in ordered)
