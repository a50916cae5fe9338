"""A terminal of the tests' own: what stands on it after the program wrote to it."""

import re

_STEP = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


class Screen:
    """Rows of characters, and a cursor that cannot leave the last `height` of them.

    Knows what the program may use and nothing else: anything else is an error.

    Attributes:
        rows: all that was ever on it, what scrolled out of sight included.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [""]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        """Obey what a program writes."""
        at = 0
        while at < len(text):
            found = _STEP.match(text, at)
            assert found, f"what is {text[at : at + 10]!r}?"
            at = found.end()
            step = found[0]
            if step == "\r":
                self.column = 0
            elif step == "\n":
                self._down()
            elif found[2]:
                self._control(found[1], found[2])
            else:
                for character in step:
                    self._put(character)

    def _control(self, number: str, kind: str) -> None:
        if kind == "A":
            top = max(0, len(self.rows) - self.height)
            assert self.row - int(number or 1) >= top, "above what can be seen"
            self.row -= int(number or 1)
        elif (kind, number) == ("K", "2"):
            self.rows[self.row] = ""
        else:
            assert kind == "m" or number == "?25", f"unknown: {number}{kind}"

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self._down()
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")

    def narrow(self, width: int) -> None:
        """Become narrower: rows that are longer are broken."""
        rows: list[str] = []
        for number, row in enumerate(self.rows):
            parts = [row[at : at + width] for at in range(0, len(row), width)] or [""]
            rows += parts
            if number == self.row:
                self.row = len(rows) - 1
                self.column = min(len(parts[-1]), width)
        self.rows, self.width = rows, width

    @property
    def text(self) -> str:
        """All of it, without what is empty at the end."""
        return "\n".join(row.rstrip() for row in self.rows).rstrip("\n")
