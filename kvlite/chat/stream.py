"""An answer on a terminal while it comes."""

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.segment import Segment
from rich.style import Style

from kvlite.chat.harmless import harmless
from kvlite.chat.region import Region
from kvlite.chat.render import Blocks, Line, lines_of

# Seconds between two drawings, and how many times as long as one takes.
_PAUSE, _SHARE = 0.08, 8


class Shown(Protocol):
    """Where an answer goes."""

    def push(self, text: str) -> None:
        """A piece more."""
        ...

    def note(self, text: str) -> None:
        """A sentence beside it."""
        ...

    def close(self) -> None:
        """That was all."""
        ...


class PlainStream:
    """As it comes: for terminals that cannot go back, and for what is none."""

    def __init__(self, write: Callable[[str], None], tell: Callable[[str], None]) -> None:
        self._write = write
        self._tell = tell

    def push(self, text: str) -> None:
        """Write it."""
        self._write(text)

    def note(self, text: str) -> None:
        """Tell it apart."""
        self._tell(text)

    def close(self) -> None:
        """End the line."""
        self._write("\n")


class MarkdownStream:
    """Rendered: finished blocks are printed for good, the open one is drawn again as it grows, with
    a line of status under it.

    Of an open block that is higher than the screen, what has scrolled out cannot be drawn again: it
    is printed for good, at the width it has by then.
    """

    def __init__(
        self,
        console: Console,
        status: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.status = status
        self.clock = clock
        self.region = Region(console)
        self.blocks = Blocks()
        self._finished: list[str] = []
        self._begun = False  # anything is printed for good
        self._cut = 0  # lines of the open block that are
        self._cut_width = 0
        self._due = 0.0
        console.show_cursor(False)

    def push(self, text: str) -> None:
        """Take a piece, and draw if it is time to."""
        self._finished += self.blocks.push(text)
        now = self.clock()
        if now >= self._due:
            self._draw()
            took = self.clock() - now
            self._due = now + took + max(_PAUSE, _SHARE * took)

    def note(self, text: str) -> None:
        """A sentence above what is still open."""
        style = Style(color="yellow")
        self.region.draw([[Segment(f"Note: {harmless(text)}", style)]], [])
        self._draw()

    def close(self) -> None:
        """Draw all that is left; the status goes."""
        above = [*self._settled(), *self._closed(self.blocks.open)]
        self.blocks = Blocks()
        self.region.draw(above, [])
        self.console.show_cursor(True)

    def _draw(self) -> None:
        above = self._settled()
        lines = self._lines(self.blocks.open)
        room = max(1, self.console.height - 4)
        if len(lines) - self._cut > room:
            end = len(lines) - room
            above += [*self._gap(), *lines[self._cut : end]]
            self._cut, self._cut_width = end, self._cut_width or self.console.width
        left = lines[self._cut :]
        gap = self._gap() if left else []
        status = [Segment(self.status(self.console.width - 1), Style(dim=True))]
        self.region.draw(above, [*gap, *left, [], status])

    def _settled(self) -> list[Line]:
        """What is finished and was not printed yet."""
        blocks, self._finished = self._finished, []
        return [line for block in blocks for line in self._closed(block)]

    def _closed(self, block: str) -> list[Line]:
        """The rest of a block, for good."""
        lines = self._lines(block)[self._cut :]
        shown = [*self._gap(), *lines] if lines else []
        self._begun |= bool(lines)
        self._cut = self._cut_width = 0
        return shown

    def _gap(self) -> list[Line]:
        """An empty line before a block, unless it is the first, or has begun above."""
        gap: list[Line] = [[]] if self._begun and not self._cut else []
        return gap

    def _lines(self, block: str) -> list[Line]:
        return lines_of(self.console, block, self._cut_width or self.console.width)
