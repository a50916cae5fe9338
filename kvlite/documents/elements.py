"""Markup of office documents as a browser would show it: its elements by the names of HTML's."""

from collections.abc import Mapping

from kvlite.documents.archive import Attributes
from kvlite.documents.tracker import Tracker
from kvlite.documents.visible_text import VisibleText

_PARAGRAPHS = ("p", "div", "h1")


class Elements:
    """Collects pages of text from a parser's events.

    Attributes:
        pages: each with what stands on it.
    """

    def __init__(self, tracker: Tracker, html_names: Mapping[str, str]) -> None:
        """Begin the first page.

        Args:
            html_names: what elements are in HTML; others are passed through.
        """
        self.pages = [VisibleText(tracker)]
        self._tracker = tracker
        self._html_names = html_names
        self._open = list[str]()
        self._inline = 0

    def begin_page(self) -> None:
        """Begin another page."""
        self.pages.append(VisibleText(self._tracker))

    def begin(self, name: str, attributes: Attributes) -> None:
        """Enter an element."""
        self.enter(self._html_names.get(name, ""), {})

    def enter(self, html_name: str, attributes: Attributes) -> None:
        """Enter an element of HTML; "" stands for nothing. Cells have their paragraphs in a row."""
        if html_name in _PARAGRAPHS and self._inline:
            self.characters(" ")
            html_name = ""
        self._inline += html_name == "td"
        self._open.append(html_name)
        if html_name:
            self.pages[-1].start(html_name, attributes)

    def end(self, name: str) -> None:
        """Leave an element."""
        html_name = self._open.pop()
        self._inline -= html_name == "td"
        if html_name:
            self.pages[-1].end(html_name)

    def characters(self, text: str) -> None:
        """Add text."""
        self.pages[-1].data(text)
