"""The cells of a sheet as text."""

from collections import defaultdict
from collections.abc import Iterator

from kvlite.documents.markup import LABEL, MOST_COLUMNS
from kvlite.documents.tracker import Tracker

# Empty columns between two cells; of more none is left.
_MOST_EMPTY = 64
_MOST_NAMED = 3


class Grid:
    """What a sheet shows; cells without a text take no memory.

    Attributes:
        rows: the texts of cells by row and column.
        drawn: those of shapes over the cells.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = defaultdict[int, dict[int, str]](dict)
        self.drawn = list[str]()
        self._notes = defaultdict[int, dict[int, str]](dict)
        self._merged = defaultdict[int, list[tuple[int, int, int]]](list)

    def merge(self, row: int, column: int, last_row: int, last_column: int) -> None:
        """Note that a cell covers those to its right and below up to another."""
        end = min(last_column + 1, column + MOST_COLUMNS)
        self._merged[row].append((column, end, last_row))

    def add_note(self, row: int, column: int, author: str, text: str) -> None:
        """Add a note to what a cell says."""
        note = f" [Note by {author}: {text}]" if author else f" [Note: {text}]"
        self._notes[row][column] = self._notes[row].get(column, "") + note

    def text(self, tracker: Tracker) -> str:
        """The sheet's name, a line for each row that has any text of its own, and the shapes.

        Raises:
            ContextError: they are longer than could fit.
        """
        lines = list[str]()
        for line in (self.name, *self._lines(), *self.drawn):
            tracker.add_characters(len(line) + 1)
            lines.append(line)
        return "\n".join(lines)

    def _lines(self) -> Iterator[str]:
        """Merged cells are repeated as those of tables are; one alone in its row is a heading."""
        start = min(map(min, (*self.rows.values(), *self._notes.values())), default=1)
        self.rows.update({row: {} for row in self._notes if row not in self.rows})
        above = dict[int, tuple[int, str]]()
        for row, cells in sorted(self.rows.items()):
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


def uncalculated(formula: str, cell: str, tracker: Tracker) -> str:
    """What stands in a cell whose formula has no value stored. The first such cells are named."""
    kind = "uncalculated formula"
    named = sum(each.startswith(kind) for each in tracker.not_read)
    tracker.not_read[f"{kind} ({cell})" if named < _MOST_NAMED else kind] += 1
    return f"[={formula}: no value]"
