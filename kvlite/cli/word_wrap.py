"""Text that comes in parts, broken between words at the edge of a terminal."""

import re
import textwrap
from collections.abc import Callable, Iterator
from shutil import get_terminal_size

from rich.cells import cell_len

_RUNS = re.compile(r"\n|[^\S\n]+|\S+")


def terminal_width() -> int:
    """Columns of the terminal now."""
    return get_terminal_size().columns


def word_wrapped(text: str) -> str:
    """A whole text, broken between words at the edge of the terminal."""
    wrap = WordWrap()
    return wrap.push(text) + wrap.flush()


def part_wrapped(text: str) -> str:
    """A line of parts with dots between, broken after a dot at the edge of the terminal."""
    held = text.replace(" ", "\u00a0").replace("\u00b7\u00a0", "\u00b7 ")
    lines = textwrap.wrap(held, terminal_width(), break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\u00a0", " ")


def option_wrapped(text: str, width: int) -> str:
    """A method with its options, as many of them a line as fit a width."""
    lines = [""]
    for part in re.findall(r"[^:+,]+[:+,]?|[:+,]", text):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip()
    return "\n".join(lines)


class WordWrap:
    """Breaks lines between words. A word is held back until it is whole, or as long as a line."""

    def __init__(self, width: Callable[[], int] = terminal_width) -> None:
        """Lines are as long as `width` says when a word is written."""
        self._width = width
        self._column = 0
        self._gap = self._word = ""

    def push(self, text: str) -> str:
        """What can be written, once the next text has come."""
        return "".join(self._pushed(text))

    def flush(self) -> str:
        """What is left, at the end of all text."""
        return self._placed() + self._gap

    def _pushed(self, text: str) -> Iterator[str]:
        for run in _RUNS.findall(text):
            if run == "\n":
                yield self._placed() + run
                self._column, self._gap = 0, ""
            elif run.isspace():
                yield self._placed()
                self._gap += run
            else:
                self._word += run
                if cell_len(self._word) >= self._width():
                    yield self._placed()

    def _placed(self) -> str:
        """The word that is held back, on the next line if it is too long for this one."""
        word, gap, self._word = self._word, self._gap, ""
        if not word:
            return ""
        self._gap, width = "", max(1, self._width())
        before, size = self._column + cell_len(gap), cell_len(word)
        if self._column and gap and before + size > width:
            gap, before = "\n", 0
        self._column = (before + size - 1) % width + 1
        return gap + word
