"""All printing goes through here, so that text from outside cannot control the terminal."""

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from kvlite.printable import escaped, harmless


class _PlainStatus(Status):
    """A spinner whose title is text, not markup."""

    def update(self, status: RenderableType | None = None, **how: Any) -> None:
        super().update(Text(status) if isinstance(status, str) else status, **how)


class Screen(Console):
    """A console without effect for control characters, markup, emoji codes and links."""

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of anything printed, tables and bars included, made harmless."""
        for text, style, control in super().render(renderable, options):
            plain = style.update_link(None) if style is not None and style.link else style
            yield Segment(text if control else harmless(text), plain, control)

    def out(self, *objects: Any, **how: Any) -> None:
        """Print text without wrapping it."""
        super().out(*(harmless(str(each)) for each in objects), **how)

    def status(self, status: RenderableType, **how: Any) -> Status:
        """A spinner with a title."""
        title = Text(status) if isinstance(status, str) else status
        return _PlainStatus(title, console=self, **how)


def output() -> Screen:
    """Standard output as it is now."""
    return Screen(file=sys.stdout)


def say(text: str) -> None:
    """Print lines on standard output, however long."""
    output().print(text, soft_wrap=True)


def write(text: str) -> None:
    """Write part of an answer to standard output: harmless on a terminal, exact elsewhere."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any, *, readable: bool = False) -> None:
    """Print a value as one line of JSON on standard output; `readable` keeps the letters of all
    languages if the output's encoding has them."""
    encoded = (sys.stdout.encoding or "ascii").lower().startswith("utf")
    print(escaped(json.dumps(value, ensure_ascii=not (readable and encoded))), flush=True)
