"""Text as a browser shows it, from the elements of a page: paragraphs, lists, tables, pictures."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

# Pages nest some dozens deep; browsers go on to 512.
_DEEPEST = 4000
_HIDDEN = frozenset(("script", "style", "template", "noscript", "datalist"))
_PARAGRAPHS = "title p h1 h2 h3 h4 h5 h6 ul ol dl table pre blockquote hr"
_LINES = (
    "address article aside caption center dd details dialog div dt fieldset figcaption figure "
    "footer form header legend li main nav option section summary tr"
)
# Marks in the text for the patterns in _TIDY: end of a line (several count as one), after a bullet,
# before a row, before a cell, a space to keep.
_END, _BULLET, _ROW, _CELL, _SPACE = "\1\2\3\4\5"
# What the text itself may not have.
MARKS = "[\0-\5]"
_BREAKS = dict.fromkeys(_PARAGRAPHS.split(), "\n\n") | dict.fromkeys(_LINES.split(), _END)
_TIDY = (
    (r" {2,}", " "),
    (r"[ \1]*\x01[ \1]*", "\n"),
    (r" ?\n ?", "\n"),
    (r"\n{3,}", "\n\n"),
    (r"(?<!\s)\s*\n(?=(?:- |-?\d+\. )\x02|\x03)", "\n"),  # no blank line before an item or a row
    (r"\x02\s*(?!- \x02|-?\d+\. \x02)", ""),
    (r"\x03\s*\x04\s*", "\3"),
    (r"(?<!\s)\s*\x04\s*", " | "),
    (r"[\2\3]", ""),
    (r" *\n *", "\n"),
    (r"\n{3,}", "\n\n"),
    (r"\x05", " "),
)
_NOT_READ = {
    "svg": "picture",
    "canvas": "picture",
    "video": "video",
    "audio": "sound recording",
    "iframe": "embedded page",
    "object": "embedded object",
    "embed": "embedded object",
}
# Browsers that can show these hide what stands inside.
_FALLBACKS = frozenset(("video", "audio", "iframe"))
_SHOWN_INPUTS = (
    "text search tel url email number range date time month week datetime-local submit reset "
    "button color"
)

Attributes = dict[str, str]


@dataclass
class _Open:
    """An element that was not closed yet."""

    hidden: bool
    numbers: Iterator[int] | None
    before: str


class VisibleText:
    """Collects text from a parser's events, by the names of HTML's elements.

    Attributes:
        parts: pieces of text with marks between them.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.parts = list[str]()
        self._tracker = tracker
        self._open = [_Open(False, None, "")]
        self._preformatted = 0

    def start(self, name: str, attributes: Attributes) -> None:
        """Enter an element."""
        around = self._open[-1]
        # `until-found` is shown to someone who looks for it.
        hidden = attributes.get("hidden", "until-found").lower() != "until-found"
        hidden = hidden or around.hidden or name in _HIDDEN
        numbers = None if name == "ul" else around.numbers
        if name == "ol":
            start = _whole(attributes.get("start", ""))
            numbers = itertools.count(1 if start is None else start)
        if len(self._open) > _DEEPEST:
            raise DocumentError(
                f"{self._tracker.label} nests elements more than {_DEEPEST:,} deep, as no page "
                "does: open it in a browser and save it as text."
            )
        before = _BREAKS.get(name, "")
        opened = _Open(hidden or name in _FALLBACKS, numbers, before)
        self._open.append(opened)
        if hidden:
            return
        self.parts.append("\n" if name == "br" else before)
        if name in _NOT_READ:
            self._tracker.not_read[_NOT_READ[name]] += 1
        elif name == "pre":
            self._preformatted += 1
        elif name == "li":
            self._begin_item(attributes, around, opened)
        elif name in ("tr", "td", "th"):
            self.parts.append(_ROW if name == "tr" else _CELL)
        elif name in ("img", "input"):
            shown = self._picture(attributes) if name == "img" else self._input(attributes)
            text = re.sub(r"[\1-\5\s]+", " ", shown)
            self._tracker.add_characters(len(text.strip()))
            self.parts.append(text)

    def end(self, name: str) -> None:
        """Leave an element."""
        closed = self._open.pop()
        if closed.hidden:
            return
        if name == "pre":
            self._preformatted -= 1
        self.parts.append(closed.before)

    def data(self, text: str) -> None:
        """Add text, if it is shown."""
        if self._open[-1].hidden:
            return
        self._tracker.add_characters(len(text.strip()))
        if self._preformatted:
            self.parts.append(text.replace(" ", _SPACE))
        else:
            self.parts.append(re.sub(r"[ \t\r\n\f]+", " ", text))

    def close(self) -> None:
        """Do nothing at the end of the page; lxml requires the method."""

    def text(self) -> str:
        """What has been collected, tidied. Raises Stopped if someone cancelled."""
        text = "".join(self.parts)
        for pattern, replacement in _TIDY:
            self._tracker.check()
            text = re.sub(pattern, replacement, text)
        return text.strip("\n")

    def _begin_item(self, attributes: Attributes, around: _Open, item: _Open) -> None:
        if around.numbers is None:
            self.parts.append(f"- {_BULLET}")
            return
        if (own := _whole(attributes.get("value", ""))) is not None:
            around.numbers = item.numbers = itertools.count(own)
        self.parts.append(f"{next(around.numbers)}. {_BULLET}")

    def _picture(self, attributes: Attributes) -> str:
        """A picture's description; one with an empty description is decoration."""
        described = attributes.get("alt", "").strip()
        if described or "alt" not in attributes:
            self._tracker.not_read["picture"] += 1
        return f"[Picture: {described}]" if described else ""

    def _input(self, attributes: Attributes) -> str:
        kind, value = attributes.get("type", "").lower(), attributes.get("value", "")
        if kind in ("checkbox", "radio"):
            return "[x] " if "checked" in attributes else "[ ] "
        if kind == "image":
            return self._picture(attributes)
        return f" {value} " if kind in ("", *_SHOWN_INPUTS.split()) and value.strip() else ""


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) else None
