"""HTML as the text that a reader sees: a line for each row of a table, list levels indented, notes
in brackets at their place. All formats with markup are made such HTML, and pass through here."""

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from kvlite.documents.list_numbers import form_of, number_in
from kvlite.documents.style_sheet import StyleSheet
from kvlite.documents.symbols import PLAIN
from kvlite.documents.tracker import Tracker

_NO_TEXT = re.compile("[\0-\x08\x0e-\x1f]")
_SKIPPED = frozenset(
    ("script", "style", "template", "noscript", "datalist", "annotation", "annotation-xml", "rp")
)
# What ends a paragraph, and what only ends a line.
_PARAGRAPHS = "title p h1 h2 h3 h4 h5 h6 dl blockquote hr pre ul ol table"
_LINES = (
    "address article aside body caption center dd details dialog div dt fieldset figcaption figure "
    "footer form header legend li main nav option section summary td textarea th tr"
)
_BREAKS = dict.fromkeys(_PARAGRAPHS.split(), 2) | dict.fromkeys(_LINES.split(), 1)
_TIGHT = frozenset(("ul", "ol", "table"))
_NOT_READ = {
    "svg": "picture",
    "canvas": "picture",
    "video": "video",
    "audio": "sound recording",
    "iframe": "embedded page",
    "object": "embedded object",
    "embed": "embedded object",
}
_MEDIA = "", "all", "screen"
_SPACED = re.compile(r"white-space\s*:\s*pre", re.I)
# Browsers that can show these hide what stands inside.
_FALLBACKS = frozenset(("video", "audio", "iframe"))
_STRUCK = frozenset(("del", "s", "strike"))
# What styles may raise, lower or strike through in a line.
_INLINE = frozenset(
    ("span", "font", "a", "b", "strong", "i", "em", "u", "small", "big", "cite", "code")
)
_SHOWN_INPUTS = (
    "text search tel url email number range date time month week datetime-local submit reset "
    "button color"
)
# Cells are repeated up to this length, as labels are, and over so many columns; from the other
# length on a row with a table in it is a page's layout.
LABEL, MOST_COLUMNS, _LAYOUT = 200, 100, 1000
# Rows that a cell reaches down to the end of its table.
_TO_THE_END = 2**31
# Tables in cells and raised text in raised text, deeper than anyone writes them.
_MOST_CAPTURES = 20

Element = Any


def text_of(root: Element, tracker: Tracker, *, gap: int = 2) -> str:
    """The text of a page.

    Args:
        root: a tree of lxml's, with HTML's names.
        gap: how many newlines stand between two paragraphs.

    Raises:
        ContextError: it is longer than could fit.
    """
    _join_marked(root)
    writer = _Writer(root, tracker, gap)
    writer.element(root)
    return writer.written()


class _Writer:
    """Writes elements one after another.

    Breaks between lines are kept back until there is something to write after them.
    """

    def __init__(self, root: Element, tracker: Tracker, gap: int) -> None:
        self._tracker, self._gap = tracker, gap
        sheets = (each for each in root.iter("style") if each.get("media", "all") in _MEDIA)
        self._sheet = StyleSheet("".join(each.text or "" for each in sheets))
        self._parts = list[str]()
        self._break = self._capturing = 0
        self._indent = self._label = self._last = ""
        self._preformatted = False
        # The first link to each note that is on the page.
        self._links = dict[Element, Element]()
        by_id = {
            f"#{each.get('id')}": each
            for each in root.iter("li", "aside", "section", "div", "p", "dd")
        }
        for link in filter(_is_note, root.iter("a")):
            if (note := by_id.get(link.get("href"))) is not None:
                self._links.setdefault(note, link)
        self._notes = {link: note for note, link in self._links.items()}

    def written(self) -> str:
        return "".join(self._parts).rstrip(" \n")

    def element(self, element: Element) -> None:
        """Write an element, without what follows it."""
        name = element.tag
        if not isinstance(name, str) or name in _SKIPPED:
            return
        effect = self._effect(element)
        if effect == "hidden":
            return
        if name in _INLINE and not _is_note(element):
            name = effect or name
        size = _BREAKS.get(name, 0)
        self._end_line(size)
        if name in _TIGHT and self._last != "table":
            self._break = 1
        spaced = _SPACED.search(element.get("style", "")) and not self._preformatted
        name = "pre" if spaced else name if self._capturing < _MOST_CAPTURES else ""
        self._special(name, element)
        self._end_line(size)
        self._last = name if size else self._last

    def _special(self, name: str, element: Element) -> None:
        """Write an element that needs more than its text."""
        match name:
            case "ul" | "ol":
                self._list(element)
            case "table":
                self._table(element)
            case "pre" | "textarea" if not self._preformatted:
                self._write(self._block(element, preformatted=True))
            case "p" if self._gap == 1 and not any(element.itertext()):
                self._break = 2
            case "br" if self._preformatted:
                self._put("\n")
            case "br":
                self._break = min(self._break + 1, 2)
            case "sup" | "sub":
                self._raised("^" if name == "sup" else "_", element)
            case "rt":
                self._put(f"({self._captured(element)})")
            case "button":
                self._put(f" {self._captured(element)} ")
            case "q":
                self._put("\u201c")
                self._inside(element)
                self._put("\u201d")
            case "a" if _is_note(element):
                self._put(self._note(element))
            case "img":
                self._put(self._picture(element))
            case "input":
                self._put(self._input(element))
            case "option" if element.get("selected") is not None:
                self._put("[x] ")
                self._inside(element)
            case "note":
                self._put(f" [Note: {self._captured(element)}]")
            case "span" if "comment-start" in element.get("class", "").split():
                by = f" by {author}" if (author := element.get("data-author")) else ""
                self._put(f" [Comment{by}: {self._captured(element)}] ")
            case _ if name in _STRUCK:
                struck = self._captured(element)
                self._put_spaced(f"~~{struck}~~" if struck else "", element)
            case _:
                self._tracker.not_read[_NOT_READ.get(name, "")] += name in _NOT_READ
                if name not in _FALLBACKS:
                    self._inside(element)

    def _inside(self, element: Element) -> None:
        self._put(element.text or "")
        for child in element:
            self.element(child)
            self._put(child.tail or "")

    def _put(self, text: str) -> None:
        """Write text as it stands in the markup."""
        if not text:
            return
        text = _NO_TEXT.sub("", text)
        if not self._preformatted:
            text = re.sub(r"[ \t\r\n\f]+", " ", text)
            begins = self._break > 0 or not self._parts
            if begins or self._parts[-1].endswith((" ", "\n")):
                text = text.lstrip(" ") if text.strip() or not begins else ""
        if text:
            self._write(text)

    def _put_spaced(self, text: str, element: Element) -> None:
        """Write what stands for an element, and the spaces that it begins and ends with."""
        before, after = _ends(element)
        self._put(before)
        self._put(text)
        self._put(after)

    def _write(self, text: str) -> None:
        """Write text after the break and the label that it waited for."""
        if self._parts and self._break:
            self._parts[-1] = self._parts[-1].rstrip(" \t")
            self._parts.append("\n" * self._break + self._indent[: -2 if self._label else None])
        text = self._label + text.translate(PLAIN)
        if self._indent:
            text = text.replace("\n", f"\n{self._indent}")
        self._break, self._label, self._last = 0, "", ""
        self._tracker.add_characters(0 if self._capturing else len(text))
        self._parts.append(text)

    def _end_line(self, size: int) -> None:
        if not self._preformatted and not self._label:
            self._break = max(self._break, min(size, self._gap))

    def _captured(self, element: Element) -> str:
        """What stands inside an element, in one line."""
        return " ".join(self._block(element).split())

    def _block(self, element: Element, *, preformatted: bool = False) -> str:
        """What stands inside an element."""
        kept = self._parts, self._break, self._indent, self._label, self._last
        self._parts, self._break, self._indent, self._label = [], 0, "", ""
        self._preformatted, was = preformatted, self._preformatted
        self._capturing += 1
        self._inside(element)
        self._capturing -= 1
        text = "".join(self._parts)
        self._parts, self._break, self._indent, self._label, self._last = kept
        self._preformatted = was
        return text.strip("\n") if preformatted else text

    def _effect(self, element: Element) -> str:
        """As of the style sheet, and "hidden" also for what is not shown for another reason."""
        # `until-found` is shown to someone who looks for it.
        hidden = element.get("hidden", "until-found").lower() != "until-found"
        closed = element.tag == "dialog" and element.get("open") is None
        elsewhere = element in self._links or element.get("role") == "doc-backlink"
        if hidden or closed or elsewhere:
            return "hidden"
        return self._sheet.effect(element.tag, element.attrib)

    def _list(self, element: Element) -> None:
        ordered, number = element.tag == "ol", _whole(element.get("start"))
        step = 1 if element.get("reversed") is None else -1
        first = 1 if step > 0 else sum(child.tag == "li" for child in element)
        number = first if number is None else number
        if self._label:
            self._write("")
        for child in element:
            if child.tag != "li" or self._effect(child) == "hidden":
                self.element(child)
                continue
            own = _whole(child.get("value"))
            number = number if own is None else own
            form = child.get("type") or element.get("type") or form_of(element.get("style", ""))
            label = f"{number_in(form, number)}. " if ordered else "- "
            self._label = child.get("data-label", label)
            self._indent += "  "
            self._break = max(self._break, 1)
            self._inside(child)
            self._label, self._indent = "", self._indent[:-2]
            self._break = 1
            number += step

    def _table(self, table: Element) -> None:
        above = dict[int, tuple[int, str]]()
        for row in _rows(table):
            if row.tag != "tr":
                self.element(row)
                continue
            self._row(row, above)
            self._break = max(self._break, 1)

    def _row(self, row: Element, above: dict[int, tuple[int, str]]) -> None:
        """Write a row in a line; cells that reach into it or over several columns are repeated,
        and of the empty ones at its end one is left.

        Args:
            above: how many rows more a cell reaches down, and its text, by column.
        """
        cells = [
            each for each in row if isinstance(each.tag, str) and self._effect(each) != "hidden"
        ]
        if (len(cells) == 1 and not above) or self._is_layout(cells):
            for cell in cells:
                self._inside(cell)
                self._end_line(1)
            return
        texts = list[str]()

        def reach() -> None:
            while len(texts) in above:
                left, text = above.pop(len(texts))
                if left > 1:
                    above[len(texts)] = left - 1, text
                texts.append(text)

        for cell in cells:
            reach()
            text = self._captured(cell)
            down = _whole(cell.get("rowspan"))
            down = _TO_THE_END if down == 0 else down or 1
            across = min(_whole(cell.get("colspan")) or 1, MOST_COLUMNS)
            label = text if len(text) <= LABEL else ""
            again = text if len(text) * across <= LABEL else ""
            for column in range(across):
                if down > 1:
                    above[len(texts)] = down - 1, again if column else label
                texts.append(again if column else text)
        reach()
        filled = max((at for at, text in enumerate(texts, 1) if text), default=0)
        if filled:
            self._write(" | ".join(texts[: filled + 1]).strip(" "))

    def _is_layout(self, cells: list[Element]) -> bool:
        inner = (each for cell in cells for each in cell.iter("table"))
        texts = (text for table in inner for text in table.itertext())
        return any(size > _LAYOUT for size in accumulate(len(text.strip()) for text in texts))

    def _raised(self, mark: str, element: Element) -> None:
        """Write raised or lowered text, in brackets if it is more than a word or a number, or if
        more of one follows."""
        text = self._captured(element)
        links = [each for each in element if each.tag == "a"]
        if len(links) == 1 and text.strip("[]") == "".join(links[0].itertext()).strip("[] \n"):
            self._put(self._note(links[0]))
        elif text.startswith("[Note: "):
            self._put(f" {text}")
        elif text:
            after = "" if _ends(element)[1] else _following(element)[:1]
            plain = re.fullmatch(r"[+\-\u2212]?\w+|\W", text)
            joins = re.fullmatch(r"\w*(\d\d|[^\W\d]{2})", text + after) and after
            self._put_spaced(f"{mark}({text})" if joins or not plain else mark + text, element)

    def _note(self, link: Element) -> str:
        """A note at the first place that refers to it, elsewhere its mark."""
        if (note := self._notes.get(link)) is not None:
            return f" [Note: {self._captured(note)}]"
        mark = self._captured(link).strip("[]^")
        return f"[{mark}]" if mark else ""

    def _picture(self, element: Element) -> str:
        """A picture's description; one with an empty description is decoration."""
        described = " ".join(element.get("alt", "").split())
        self._tracker.not_read["picture"] += bool(described or element.get("alt") is None)
        return f"[Picture: {described}]" if described else ""

    def _input(self, element: Element) -> str:
        kind, value = element.get("type", "text").lower(), element.get("value", "")
        if kind in ("checkbox", "radio"):
            return "[ ] " if element.get("checked") is None else "[x] "
        if kind == "image":
            return self._picture(element)
        return f" {value} " if kind in _SHOWN_INPUTS.split() and value.strip() else ""


def _join_marked(root: Element) -> None:
    """Join raised, lowered or struck text with that of the same kind right before it, but for
    marks of notes."""
    for each in list(root.iter("sup", "sub", *_STRUCK)):
        before = each.getprevious()
        alike = before is not None and before.tag == each.tag and not before.tail
        if alike and before.find("a") is None and each.find("a") is None:
            before.tail, each.tail, each.tag = each.tail, None, "span"
            before.append(each)


def _rows(table: Element) -> Iterator[Element]:
    """The rows of a table and what else stands in it, the foot last; cells without a row are given
    one."""
    row = None
    for child in sorted(table, key=lambda each: each.tag == "tfoot"):
        if child.tag in ("td", "th"):
            row = table.makeelement("tr") if row is None else row
            row.append(child)
            continue
        if row is not None:
            yield row
            row = None
        if child.tag in ("thead", "tbody", "tfoot"):
            yield from _rows(child)
        else:
            yield child
    if row is not None:
        yield row


def _following(element: Element) -> str:
    """The text right after an element."""
    after = element.getnext()
    return element.tail or ("" if after is None else next(after.itertext(), ""))


def _ends(element: Element) -> tuple[str, str]:
    """The spaces that an element begins and ends with."""
    text = "".join(element.itertext()).translate(PLAIN)
    return " " if text[:1].isspace() else "", " " if text[-1:].isspace() else ""


def _is_note(link: Element) -> bool:
    """Whether a link leads to a note."""
    return "noteref" in (link.get("epub:type") or "") + (link.get("role") or "")


def _whole(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) else None
