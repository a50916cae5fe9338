"""Lines at the end of what a terminal shows, which are drawn again and again."""

from collections.abc import Sequence

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType, Segment, Segments

from kvlite.cli.chat.render import Line


class Region:
    """The last lines; what is printed above them stays.

    A terminal that becomes narrower breaks lines that are on it already: they take more rows then.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._widths: list[int] = []

    @property
    def _rows(self) -> int:
        columns = max(1, self.console.width)
        return sum(max(1, -(-width // columns)) for width in self._widths)

    def draw(self, above: Sequence[Line], lines: Sequence[Line]) -> None:
        """Put `lines` in place of those that were drawn last, under `above`, in one write."""
        console = self.console
        with console:
            self._erase()
            self._print([*above, *lines], ended=not lines)
            self._widths = [Segment.get_line_length(line) for line in lines]

    def _erase(self) -> None:
        rows = self._rows
        if not rows:
            return
        up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * (rows - 1)
        start = ((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2))
        self.console.control(Control(*start, *up))

    def _print(self, lines: Sequence[Line], *, ended: bool) -> None:
        """Lines as they are; the cursor stays behind the last one unless it is to end."""
        segments = [segment for line in lines for segment in (*line, Segment.line())]
        shown = Segments(segments if ended else segments[:-1])
        self.console.print(shown, end="", crop=False, no_wrap=True, overflow="ignore")
