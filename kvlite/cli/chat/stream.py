"""An answer on a terminal while it comes."""

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.segment import Segment
from rich.style import Style

from kvlite.cli.chat.region import Region
from kvlite.cli.chat.render import Blocks, Line, lines_of
from kvlite.printable import harmless

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

    Of an open block that is higher than the screen, what scrolls out cannot be drawn again: it is
    printed for good, at the width it has by then. Should it change all the same, as tables do, it
    is printed again from there on when it is whole: nothing is lost.
    """

    def __init__(
        self,
        console: Console,
        status: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin an answer.

        Args:
            status: the last line, of at most so many columns.
        """
        self.console = console
        self.status = status
        self.clock = clock
        self.region = Region(console)
        self.blocks = Blocks()
        self._finished: list[str] = []
        self._begun = False
        self._due = 0.0
        self._new_block()
        console.show_cursor(False)

    def _new_block(self) -> None:
        self._printed: list[str] = []  # lines of the first open block, for good
        self._width = 0  # at which the former were printed

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
        self.region.draw([[Segment(f"Note: {harmless(text)}", Style(color="yellow"))]], [])
        self._draw()

    def close(self) -> None:
        """Print all that is left; the status goes."""
        left = [*self._finished, *self.blocks.parts]
        self._finished, self.blocks = [], Blocks()
        self.region.draw([line for block in left for line in self._closed(block)], [])
        self.console.show_cursor(True)

    def _draw(self) -> None:
        blocks, self._finished = self._finished, []
        above = [line for block in blocks for line in self._closed(block)]
        first, *others = self.blocks.parts or [""]
        lines = self._lines(first)
        texts = _texts(lines)
        same = _same(self._printed, texts)
        rest = [line for other in others for line in ([], *self._lines(other))]
        room = max(1, self.console.height - 4)
        end = max(same, min(len(lines), len(lines) + len(rest) - room))
        if same < len(self._printed):
            end = same  # it changed: once it is whole, all of that is printed again
        gap = self._gap()
        if end > same:
            above += [*gap, *lines[same:end]]
            self._printed, self._width = texts[:end], self._width or self.console.width
            gap = []
        shown = [*lines[end:], *rest][-room:]
        status = [Segment(self.status(self.console.width - 1), Style(dim=True))]
        lines = [*(gap if shown else []), *shown, [], status]
        self.region.draw(above, lines[-max(1, self.console.height - 1) :])

    def _closed(self, block: str) -> list[Line]:
        """What is left of a block, for good."""
        lines = self._lines(block)
        left = lines[_same(self._printed, _texts(lines)) :]
        shown = [*self._gap(), *left] if left else []
        self._begun |= bool(lines)
        self._new_block()
        return shown

    def _gap(self) -> list[Line]:
        """An empty line before a block, unless it is the first, or has begun above."""
        gap: list[Line] = [[]] if self._begun and not self._printed else []
        return gap

    def _lines(self, block: str) -> list[Line]:
        return lines_of(self.console, block, self._width or self.console.width)


def _texts(lines: list[Line]) -> list[str]:
    return ["".join(segment.text for segment in line) for line in lines]


def _same(some: list[str], others: list[str]) -> int:
    """How many lines both begin with."""
    pairs = zip(some, others, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others))
    )
