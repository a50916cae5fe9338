"""Draws where every byte is."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvlite.cli.chat.bars import bar, marks
from kvlite.config.units import readable
from kvlite.planner.usage import FREE, Place

_COLOURS = ("blue", "green", "cyan", "magenta", "yellow", "red", "bright_blue", "bright_black")
# Below so many columns what there is to say of a part is left out.
_ROOMY = 70


class MemoryView:
    """A bar and a table for each place."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines that fit the console."""
        for number, place in enumerate(self.places):
            if number:
                yield Text()
            used = f"{readable(place.used)} of {readable(place.total)} used"
            yield Text(f"{place.name}: {used}", style="bold")
            yield _drawn(place, options.max_width, options.ascii_only)
            yield _table(place, options.max_width >= _ROOMY, options.ascii_only)


def _drawn(place: Place, width: int, ascii_only: bool) -> Text:
    """A bar, each part in a mark and a colour of its own: colours may be missing."""
    parts = [(part.name, part.nbytes / place.total) for part in place.parts[:-1]]
    text, kinds = Text(no_wrap=True), marks(ascii_only)
    for mark in bar(parts, min(width, 72), ascii_only=ascii_only):
        number = kinds.find(mark)
        text.append(mark, _COLOURS[number] if number >= 0 else "bright_black")
    return text


def _table(place: Place, roomy: bool, ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", *(["left"] if roomy else [])):
        table.add_column(justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]
    kinds = marks(ascii_only)
    for number, part in enumerate(place.parts):
        free = part.name == FREE
        mark = Text(" ") if free else Text(kinds[number % len(kinds)], _COLOURS[number % 8])
        about = [Text(part.about, style="dim")] if roomy else []
        table.add_row(mark, part.name, readable(part.nbytes), *about)
    return table
