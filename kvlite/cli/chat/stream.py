"""An answer on a terminal, drawn as Markdown while it is written."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console
from rich.control import Control
from rich.markdown import Heading, Markdown, MarkdownElement
from rich.segment import ControlType, Segment, Segments
from rich.style import Style

from kvlite.printable import harmless

Line = list[Segment]

# Seconds between two drawings, and how many times as long as drawing itself takes.
_PAUSE, _SHARE = 0.08, 8

# HTML tags and link definitions are shown as text: nothing that a model wrote may vanish.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_PARSER.disable("reference")


class Blocks:
    """A growing Markdown text, split where a block can no longer change; `open` still may."""

    def __init__(self) -> None:
        self.open = ""

    def push(self, text: str) -> list[str]:
        """Add text and return the blocks it finishes. Only a whole line can start a block."""
        self.open += text
        if "\n" not in text:
            return []
        end = self.open.rfind("\n") + 1
        *finished, last = _blocks(self.open[:end]) or [""]
        self.open = last + self.open[end:] if finished else self.open
        return [block.rstrip() for block in finished]

    @property
    def parts(self) -> list[str]:
        """The blocks of the open part, as it stands."""
        return [block for block in _blocks(self.open) if block.strip()]


def _blocks(text: str) -> list[str]:
    starts = [
        token.map[0]
        for token in _PARSER.parse(text)
        if token.level == 0 and token.map is not None and token.nesting >= 0
    ]
    lines = text.split("\n")
    ends = pairwise([0, *starts[1:], len(lines)])
    blocks = ["\n".join(lines[start:end]) for start, end in ends]
    return [f"{block}\n" for block in blocks[:-1]] + blocks[-1:]


class _LeftHeading(Heading):
    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _ChatMarkdown(Markdown):
    """Markdown as models write it: a line break in the text is one on the screen."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
    }

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def lines_of(console: Console, text: str) -> list[Line]:
    """A block of Markdown as lines, without trailing spaces and without empty lines around it."""
    options = console.options.update(height=None)
    drawn = console.render_lines(_ChatMarkdown(harmless(text)), options, pad=False)
    lines = [_trimmed(line) for line in drawn]
    full = [number for number, line in enumerate(lines) if line]
    return lines[full[0] : full[-1] + 1] if full else []


def _trimmed(line: Line) -> Line:
    line = list(line)
    while line and not line[-1].text.rstrip():
        line.pop()
    if line:
        text, style, control = line[-1]
        line[-1] = Segment(text.rstrip(), style, control)
    return line


class MarkdownStream:
    """Prints finished blocks for good and redraws the open one as it grows, above a status line.

    Of an open block taller than the screen only the end is shown until it is finished.
    `rich.live.Live` is not used: it leaves lines behind when the terminal becomes narrower.
    """

    def __init__(
        self,
        console: Console,
        status: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hide the cursor and wait for text; `status` makes a line of at most so many columns."""
        self.console = console
        self.status = status
        self.clock = clock
        self.blocks = Blocks()
        self._finished: list[str] = []
        self._begun = False
        self._due = 0.0
        self._widths: list[int] = []  # of the lines that are redrawn
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
        """Print a note above the open block."""
        self._replace([[Segment(f"Note: {harmless(text)}", Style(color="yellow"))]], [])
        self._draw()

    def close(self) -> None:
        """Print what is left and remove the status line."""
        self._finished += self.blocks.parts
        self.blocks = Blocks()
        self._replace(self._take_finished(), [])
        self.console.show_cursor(True)

    def _draw(self) -> None:
        above = self._take_finished()
        status = Segment(self.status(self.console.width - 1), Style(dim=True))
        lines = [*self._spaced(self.blocks.parts), [], [status]]
        self._replace(above, lines[-max(1, self.console.height - 1) :])

    def _take_finished(self) -> list[Line]:
        lines = self._spaced(self._finished)
        self._finished = []
        self._begun |= bool(lines)
        return lines

    def _spaced(self, blocks: Iterable[str]) -> list[Line]:
        """Blocks as lines, with an empty line before each but the first of the answer."""
        lines: list[Line] = []
        for drawn in (lines_of(self.console, block) for block in blocks):
            lines += [[], *drawn] if drawn and (self._begun or lines) else drawn
        return lines

    def _replace(self, above: Sequence[Line], lines: Sequence[Line]) -> None:
        """Print `above` and then `lines` in place of the lines drawn last, in one write."""
        with self.console as console:
            # A terminal that became narrower has wrapped those lines: they take more rows now.
            columns = max(1, console.width)
            rows = sum(max(1, -(-width // columns)) for width in self._widths)
            if rows:
                up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * (rows - 1)
                start = ((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2))
                console.control(Control(*start, *up))
            segments = [each for line in (*above, *lines) for each in (*line, Segment.line())]
            shown = Segments(segments[:-1] if lines else segments)
            console.print(shown, end="", crop=False, no_wrap=True, overflow="ignore")
        self._widths = [Segment.get_line_length(line) for line in lines]
