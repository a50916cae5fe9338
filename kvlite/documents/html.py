"""The visible text of an HTML page.

Its markup is read as it comes, by a parser whose time grows with the page and no faster.
"""

import html
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvlite.documents.following import Following
from kvlite.documents.parser_errors import PARSER_ERRORS
from kvlite.errors import DocumentError

# Pages nest some dozens deep; browsers go on to 512.
_DEEPEST = 4000
_PIECE = 2**16
_HIDDEN = frozenset(("script", "style", "template", "noscript", "datalist"))
_PARAGRAPHS = "title p h1 h2 h3 h4 h5 h6 ul ol dl table pre blockquote hr"
_LINES = (
    "address article aside caption center dd details dialog div dt fieldset figcaption figure "
    "footer form header legend li main nav option section summary tr"
)
# Marks in text made from HTML, for the patterns below it: a line ends (once), after a bullet,
# before a row, before a cell, a space to keep.
_END, _BULLET, _ROW, _CELL, _SPACE = "\1\2\3\4\5"
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
# What stands in them is shown where they cannot be.
_INSTEAD = frozenset(("video", "audio", "iframe"))
_SHOWN_INPUTS = frozenset(
    (
        *("", "text", "search", "tel", "url", "email", "number", "range", "date", "time", "month"),
        *("week", "datetime-local", "submit", "reset", "button", "color"),
    )
)

Attributes = dict[str, str]


def html_text(markup: str, following: Following) -> str:
    """The visible text of a page.

    Raises:
        DocumentError: it nests deeper than any page.
        ContextError: it is longer than could fit.
        Stopped: someone cancelled.
    """
    from lxml.etree import LxmlError

    page = _Page(following)
    try:
        _tell(re.sub("[\0-\5]", "", _without_cdata(markup)), page, following)
    except (LxmlError, *PARSER_ERRORS) as error:
        raise DocumentError(
            f"{following.label} cannot be read as HTML: open it in a browser and save it as text."
        ) from error
    text = "".join(page.parts)
    for pattern, replacement in _TIDY:
        following.check()
        text = re.sub(pattern, replacement, text)
    return text.strip("\n")


def _tell(markup: str, page: "_Page", following: Following) -> None:
    """Tell a page what stands in it."""
    from lxml.etree import HTMLParser

    parser = HTMLParser(target=page, huge_tree=True, remove_comments=True, remove_pis=True)
    for start in range(0, len(markup), _PIECE):
        following.done(start, len(markup))
        parser.feed(markup[start : start + _PIECE])
    if markup:
        parser.close()


def _without_cdata(markup: str) -> str:
    """XHTML's sections of plain text, which HTML takes for comments, as it writes such text."""
    if not markup.lstrip("\ufeff \t\r\n").startswith("<?xml"):
        return markup
    first, *others = markup.split("<![CDATA[")
    parts = [first]
    for other in others:
        text, end, after = other.partition("]]>")
        parts += [html.escape(text), after] if end else ["<![CDATA[", other]
    return "".join(parts)


@dataclass
class _Open:
    """An element whose end has not come."""

    name: str
    hidden: bool
    numbers: Iterator[int] | None
    before: str


class _Page:
    """Takes elements as a parser tells of them.

    Attributes:
        parts: of the text, with marks between them.
    """

    def __init__(self, following: Following) -> None:
        self.parts = list[str]()
        self._following = following
        self._open = [_Open("", False, None, "")]
        self._preformatted = 0

    def start(self, name: str, attributes: Attributes) -> None:
        """Take an element's beginning."""
        inside = self._open[-1]
        hidden = inside.hidden or name in _HIDDEN or _is_hidden(attributes)
        numbers = inside.numbers
        if name in ("ol", "ul"):
            numbers = _numbers(attributes) if name == "ol" else None
        if len(self._open) > _DEEPEST:
            raise DocumentError(
                f"{self._following.label} nests elements more than {_DEEPEST:,} deep, as no page "
                "does: open it in a browser and save it as text."
            )
        before = _BREAKS.get(name, "")
        opened = _Open(name, hidden or name in _INSTEAD, numbers, before)
        self._open.append(opened)
        if hidden:
            return
        self.parts.append("\n" if name == "br" else before)
        if name in _NOT_READ:
            self._following.not_read[_NOT_READ[name]] += 1
        elif name == "pre":
            self._preformatted += 1
        elif name == "li":
            self._begin_item(attributes, opened)
        elif name in ("tr", "td", "th"):
            self.parts.append(_ROW if name == "tr" else _CELL)
        elif name in _SHOW:
            self._say(_SHOW[name](self._following, attributes))

    def end(self, name: str) -> None:
        """Take an element's end."""
        closed = self._open.pop()
        if closed.hidden:
            return
        if name == "pre":
            self._preformatted -= 1
        self.parts.append(closed.before)

    def data(self, text: str) -> None:
        """Take characters."""
        if self._open[-1].hidden:
            return
        self._following.came_out(len(text.strip()))
        if self._preformatted:
            self.parts.append(text.replace(" ", _SPACE))
        else:
            self.parts.append(re.sub(r"[ \t\r\n\f]+", " ", text))

    def close(self) -> None:
        """Take the page's end."""

    def _say(self, text: str) -> None:
        """Say what stands in an element's attributes."""
        text = re.sub(r"[\1-\5\s]+", " ", text)
        self._following.came_out(len(text.strip()))
        self.parts.append(text)

    def _begin_item(self, attributes: Attributes, item: _Open) -> None:
        around = self._open[-2]
        if around.numbers is None:
            self.parts.append(f"- {_BULLET}")
            return
        if (own := _whole(attributes.get("value", ""))) is not None:
            around.numbers = item.numbers = itertools.count(own)
        self.parts.append(f"{next(around.numbers)}. {_BULLET}")


def _is_hidden(attributes: Attributes) -> bool:
    """Whether an element is not shown; `until-found` shows what someone looks for."""
    return attributes.get("hidden", "until-found").lower() != "until-found"


def _numbers(attributes: Attributes) -> Iterator[int]:
    start = _whole(attributes.get("start", ""))
    return itertools.count(1 if start is None else start)


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) else None


def _picture(following: Following, attributes: Attributes) -> str:
    """What is said of a picture; one with an empty description is decoration."""
    described = attributes.get("alt", "").strip()
    if described or "alt" not in attributes:
        following.not_read["picture"] += 1
    return f"[Picture: {described}]" if described else ""


def _input(following: Following, attributes: Attributes) -> str:
    kind, value = attributes.get("type", "").lower(), attributes.get("value", "")
    if kind in ("checkbox", "radio"):
        return "[x] " if "checked" in attributes else "[ ] "
    if kind == "image":
        return _picture(following, attributes)
    return f" {value} " if kind in _SHOWN_INPUTS and value.strip() else ""


_SHOW: dict[str, Callable[[Following, Attributes], str]] = {
    "img": _picture,
    "input": _input,
}
