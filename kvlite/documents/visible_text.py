"""What a browser shows of a page, from a parser's events, as plain and well-formed HTML for pandoc:
paragraphs, lists, tables, formulas. What is hidden is left out, and pictures are counted."""

import html
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvlite.documents.pandoc import LETTERS, pandoc_text, with_lost
from kvlite.documents.pandoc_text import LABEL, LABELLED, LINE, MARKS, PAGE
from kvlite.documents.style_sheet import StyleSheet
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

# Pages nest some dozens deep; browsers go on to 512.
_DEEPEST = 4000
# Lists and tables within others, raised text within raised text, and elements of a formula.
_MOST_CONTAINERS, _MOST_INLINE, _MOST_MATH = 40, 6, 60
_HIDDEN = frozenset(
    ("script", "style", "template", "noscript", "datalist", "annotation", "annotation-xml")
)
_PARAGRAPHS = "title p h1 h2 h3 h4 h5 h6 dl blockquote hr pre ul ol table"
_LINES = (
    "address article aside caption center dd details dialog div dt fieldset figcaption figure "
    "footer form header legend main nav option section summary"
)
_ONLY_LINE = dict.fromkeys(_PARAGRAPHS.split(), False) | dict.fromkeys(_LINES.split(), True)
_WITHIN = {"li": "ul", "tr": "table", "td": "tr"}
_CONTAINERS = {"ul": "ul", "ol": "ul", "li": "li", "table": "table", "tr": "tr", "td": "td",
               "th": "td", "caption": "td"}  # fmt: skip
_INLINE = {"sup": "sup", "sub": "sub", "del": "del", "s": "del", "strike": "del"}
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
# Marks and control characters.
NOT_TEXT = f"[\0-\x08\x0e-\x1f]|{MARKS}"

Attributes = dict[str, str]


@dataclass
class _Open:
    """An element that was not closed yet."""

    hidden: bool
    numbers: Iterator[int] | None
    depth: int = 0
    inside: int = 0
    inline: bool = False
    note: bool = False


class VisibleText:
    """Collects text from a parser's events, by the names of HTML's elements.

    Attributes:
        pieces: the text that is shown, in order.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.pieces = list[str]()
        self._parts = list[str]()
        self._tracker = tracker
        self._sheet = StyleSheet()
        self._open = [_Open(False, None)]
        self._containers = list[str]()
        self._inline = list[str]()
        self._in_paragraph = False
        self._only_line = False
        self._label = ""
        self._in_note = False
        self._preformatted = self._math = 0

    def start(self, name: str, attributes: Attributes) -> None:
        """Enter an element."""
        around = self._open[-1]
        # `until-found` is shown to someone who looks for it.
        hidden = attributes.get("hidden", "until-found").lower() != "until-found"
        hidden = hidden or around.hidden or name in _HIDDEN or self._sheet.hides(name, attributes)
        numbers = None if name == "ul" else around.numbers
        if name == "ol":
            start = _whole(attributes.get("start", ""))
            numbers = itertools.count(1 if start is None else start)
        if len(self._open) > _DEEPEST:
            raise DocumentError(
                f"{self._tracker.label} nests elements more than {_DEEPEST:,} deep, as no page "
                "does: open it in a browser and save it as text."
            )
        opened = _Open(hidden or name in _FALLBACKS, numbers, len(self._containers))
        self._open.append(opened)
        if name == "style":
            self._sheet.begin()
        if hidden:
            return
        if name == "math" or self._math:
            self._begin_math(name)
        elif name in _ONLY_LINE:
            self._break(_ONLY_LINE[name])
        if name in _CONTAINERS and not self._preformatted:
            self._begin_container(name, attributes, around, opened)
        elif name == "a" and _is_note(attributes) and "sup" not in self._inline:
            self._put("[")
            opened.note = self._in_note = True
        elif name in _INLINE or (name == "a" and self._inline[-1:] == ["sup"]):
            self._begin_inline(_INLINE.get(name, name), opened)
        elif name == "br":
            self._line_break()
        elif name == "pre":
            self._begin_code()
        elif name == "q":
            self._put("\u201c")
        elif name in _NOT_READ:
            self._tracker.not_read[_NOT_READ[name]] += 1
        elif name in ("img", "input"):
            shown = self._picture(attributes) if name == "img" else self._input(attributes)
            text = re.sub(r"\s+", " ", re.sub(NOT_TEXT, "", shown))
            self._tracker.add_characters(len(text.strip()))
            self._put(text)
        opened.inside = len(self._containers)

    def end(self, name: str) -> None:
        """Leave an element."""
        closed = self._open.pop()
        if name == "style":
            self._sheet.end()
        if closed.hidden and name not in _FALLBACKS:
            return
        if self._math:
            self._end_math(name)
        elif name == "pre" and self._preformatted:
            self._end_code()
        elif closed.inline:
            self._end_inline()
        elif closed.note:
            self._in_note = False
            self._put("]")
        elif name == "q":
            self._put("\u201d")
        elif name in _CONTAINERS and not self._preformatted:
            self._close_to(closed.depth)
        if name in _ONLY_LINE:
            self._break(_ONLY_LINE[name])

    def data(self, text: str) -> None:
        """Add text, if it is shown."""
        self._sheet.data(text)
        if self._open[-1].hidden:
            return
        text = re.sub(NOT_TEXT, "", text)
        self._tracker.add_characters(len(text.strip()))
        if self._parts[-1:] == ["<pre>"]:
            text = text.removeprefix("\n")
        if not self._math or len(text.strip()) > LETTERS:
            self.pieces.append(text)
        if not self._preformatted:
            text = re.sub(r"[ \t\r\n\f]+", " ", text)
        self._put(text)

    def close(self) -> None:
        """Do nothing at the end of the page; lxml requires the method."""

    def markup(self) -> str:
        """The whole page; nothing can be added any more."""
        if self._preformatted:
            self._end_code()
        self._close_to(0)
        return "".join(self._parts)

    def _put(self, text: str) -> None:
        if self._preformatted or self._math:
            self._parts.append(html.escape(text, quote=False))
        elif self._in_paragraph or text.strip():
            text = text if self._in_paragraph else text.lstrip(" ")
            self._begin_paragraph()
            self._parts.append(html.escape(text, quote=False))

    def _begin_paragraph(self) -> None:
        if self._in_paragraph:
            return
        self._begin_content()
        self._in_paragraph = True
        line, self._only_line = LINE if self._only_line else "", False
        label, self._label = self._label, ""
        self._parts += ["<p>", label or line, *(f"<{each}>" for each in self._inline)]

    def _begin_content(self) -> None:
        """Text stands in items and cells, not between them."""
        within = {"ul": ("li",), "table": ("tr", "td"), "tr": ("td",)}
        for name in within.get(self._containers[-1] if self._containers else "", ()):
            self._begin(name)

    def _break(self, only_line: bool) -> None:
        """End a paragraph, if one is open."""
        if self._preformatted:
            return
        if self._in_paragraph:
            self._only_line = only_line
            self._parts += [*(f"</{each}>" for each in reversed(self._inline)), "</p>"]
        else:
            self._only_line = self._only_line and only_line
        self._in_paragraph = False

    def _line_break(self) -> None:
        if self._preformatted:
            self._parts.append("\n")
        elif self._in_paragraph:
            self._parts.append("<br/>")
        else:
            self._only_line = False

    def _begin(self, name: str, attributes: str = "") -> None:
        self._containers.append(name)
        self._parts.append(f"<{name}{attributes}>")

    def _close_to(self, depth: int) -> None:
        self._break(False)
        if self._label:
            self._begin_paragraph()
            self._break(False)
        while len(self._containers) > depth:
            self._parts.append(f"</{self._containers.pop()}>")
            self._only_line = False

    def _begin_container(
        self, name: str, attributes: Attributes, around: _Open, opened: _Open
    ) -> None:
        kind = _CONTAINERS[name]
        if self._label:
            self._begin_paragraph()
        if kind in _WITHIN:
            self._close_to(max(around.inside, around.depth))
        self._break(False)
        opened.depth = len(self._containers)
        if len(self._containers) > _MOST_CONTAINERS:
            return
        parents, parent = list[str](), _WITHIN.get(kind)
        inner = self._containers[-1] if self._containers else ""
        while parent is not None and inner != parent:
            parents.insert(0, parent)
            parent = _WITHIN.get(parent)
        if kind in ("ul", "table") or parents[:1] in (["ul"], ["table"]):
            self._begin_content()
        for each in parents:
            self._begin(each)
        spans = ""
        if kind == "td":
            spans = "".join(
                f' {each}="{min(number, 1000)}"'
                for each in ("rowspan", "colspan")
                if (number := _whole(attributes.get(each, "")) or 0) > 1
            )
        self._begin(kind, spans)
        if kind == "li" and around.numbers is not None:
            if (own := _whole(attributes.get("value", ""))) is not None:
                around.numbers = opened.numbers = itertools.count(own)
            self._label = f"{LABEL}{next(around.numbers)}. {LABELLED}"

    def _begin_inline(self, name: str, opened: _Open) -> None:
        if self._preformatted:
            self._put({"sup": "^", "sub": "_"}.get(name, ""))
        if self._preformatted or self._math or self._in_note or len(self._inline) >= _MOST_INLINE:
            return
        self._begin_paragraph()
        opened.inline = True
        self._inline.append(name)
        self._parts.append('<a href="#">' if name == "a" else f"<{name}>")

    def _end_inline(self) -> None:
        name = self._inline.pop()
        if self._in_paragraph:
            self._parts.append(f"</{name}>")

    def _begin_code(self) -> None:
        if not self._preformatted:
            self._begin_content()
            self._parts.append("<pre>")
        self._preformatted += 1

    def _end_code(self) -> None:
        self._preformatted -= 1
        if not self._preformatted:
            self._parts.append("</pre>")

    def _begin_math(self, name: str) -> None:
        if not self._math:
            self._begin_paragraph()
        self._math += 1
        if self._math < _MOST_MATH and re.fullmatch("[a-z]+", name):
            self._parts.append(f"<{name}>")

    def _end_math(self, name: str) -> None:
        if self._math < _MOST_MATH and re.fullmatch("[a-z]+", name):
            self._parts.append(f"</{name}>")
        self._math -= 1

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


def texts_of(pages: Sequence[VisibleText], tracker: Tracker) -> list[str]:
    """The text of each page; errors as of `pandoc_text`."""
    markup = f"<p>{PAGE}</p>".join(page.markup() for page in pages)
    text = pandoc_text(markup.encode(errors="replace"), "html", tracker)
    text = with_lost(text, (piece for page in pages for piece in page.pieces))
    return [page.strip("\n") for page in text.split(PAGE)]


def _is_note(attributes: Attributes) -> bool:
    """Whether a link leads to a note."""
    return "noteref" in attributes.get("epub:type", "") + attributes.get("role", "")


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) else None
