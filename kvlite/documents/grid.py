"""The cells of a sheet as text."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from kvlite.documents.markup import LABEL, MOST_COLUMNS
from kvlite.documents.tracker import Tracker

# Empty columns between two cells; of more none is left.
_MOST_EMPTY = 64
_MOST_NAMED = 3


class Grid:
    """What a sheet shows; cells without a text take no memory.

    Attributes:
        name: that of the sheet.
        drawn: the texts of shapes over the cells.
    """

    def __init__(self, tracker: Tracker, name: str = "") -> None:
        self.name = name
        self.drawn = list[str]()
        self._tracker, self._counted = tracker, 0
        self._rows = defaultdict[int, dict[int, str]](dict)
        self._notes = defaultdict[int, dict[int, str]](dict)
        self._merged = defaultdict[int, list[tuple[int, int, int]]](list)

    def add(self, row: int, cells: dict[int, str]) -> None:
        """Add texts by their columns.

        Raises:
            ContextError: they are longer than could fit.
        """
        self._rows[row].update(cells)
        self._count(sum(map(len, cells.values())) + len(cells))

    def merge(self, row: int, column: int, last_row: int, last_column: int) -> None:
        """Note that a cell covers those to its right and below up to another."""
        end = min(last_column + 1, column + MOST_COLUMNS)
        self._merged[row].append((column, end, last_row))

    def add_note(self, row: int, column: int, author: str, text: str) -> None:
        """Add a note to what a cell says."""
        note = f" [Note by {author}: {text}]" if author else f" [Note: {text}]"
        self._notes[row][column] = self._notes[row].get(column, "") + note

    def text(self) -> str:
        """The sheet's name, a line for each row that has any text of its own, and the shapes.
        Raises as `add`."""
        lines, size = list[str](), 0
        for line in chain((self.name,), self._lines(), self.drawn):
            size += len(line) + 1
            self._count(size - self._counted)
            lines.append(line)
        return "\n".join(lines)

    def uncalculated(self, formula: str, cell: str) -> str:
        """What stands in a cell whose formula has no value stored. The first are named."""
        kind, not_read = "uncalculated formula", self._tracker.not_read
        named = sum(each.startswith(kind) for each in not_read)
        not_read[f"{kind} ({self.name}!{cell})" if named < _MOST_NAMED else kind] += 1
        return f"[={formula}: no value]"

    def _count(self, more: int) -> None:
        if more > 0:
            self._counted += more
            self._tracker.add_characters(more)

    def _lines(self) -> Iterator[str]:
        """Merged cells are repeated as those of tables are; one alone in its row is a heading."""
        start = min(map(min, (*self._rows.values(), *self._notes.values())), default=1)
        self._rows.update({row: {} for row in self._notes if row not in self._rows})
        above = dict[int, tuple[int, str]]()
        for row, cells in sorted(self._rows.items()):
            above = {column: kept for column, kept in above.items() if kept[0] >= row}
            is_heading = len(cells) == 1 and not above
            for first, end, last_row in self._merged.get(row, ()):
                size = len(cells.get(first, ""))
                if 0 < size <= LABEL:
                    columns = range(first, end if size * (end - first) <= LABEL else first + 1)
                    above.update(dict.fromkeys(columns, (last_row, cells[first])))
            for column, (_, text) in () if is_heading else above.items():
                cells.setdefault(column, text)
            for column, note in self._notes.get(row, {}).items():
                cells[column] = (cells.get(column, "") + note).strip()
            yield " | ".join(_spread(cells, start))


def _spread(cells: dict[int, str], start: int) -> Iterator[str]:
    """The texts of a row, and empty ones where there are none."""
    for column, text in sorted(cells.items()):
        if 0 < column - start <= _MOST_EMPTY:
            yield from [""] * (column - start)
        yield text
        start = column + 1
