"""Rich text (.rtf): its control words as the elements of a page."""

import codecs
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from kvlite.documents.document import whole_characters
from kvlite.documents.markup import text_of
from kvlite.documents.symbols import SPACE, TAB, shown_in
from kvlite.documents.tracker import Tracker

Element = Any

_TOKEN = re.compile(
    r"\\([a-z]{1,32})(-?[0-9]{1,10})?[ ]?|\\'([0-9a-f]{2})|\\(.)|([{}])|([^\\{}]+)", re.I | re.S
)
# What no XML may contain, and lxml refuses.
_NO_TEXT = re.compile("[\0-\x08\x0b-\x1f\ufffe\uffff]")
# Tokens between two reports of progress.
_BEAT = 10_000
_CODECS = {
    77: "mac_roman", 128: "cp932", 129: "cp949", 130: "johab", 134: "gbk", 136: "cp950",
    161: "cp1253", 162: "cp1254", 163: "cp1258", 177: "cp1255", 178: "cp1256", 186: "cp1257",
    204: "cp1251", 222: "cp874", 238: "cp1250", 254: "cp437", 255: "cp437",
}  # fmt: skip
_PAGES = {"mac": "mac_roman", "pc": "cp437", "pca": "cp850"}
# What is no text, besides what begins with \*.
_SKIPPED = frozenset((
    "colortbl", "stylesheet", "info", "fldinst", "pict", "objdata", "nonshppict", "sp", "filetbl",
    "revtbl", "listtable", "xe", "tc", "template", "shprslt", "nonesttables", "fonttbl",
))  # fmt: skip
_SHOWN = frozenset(("shppict", "shpinst", "do", "footnote", "annotation"))
_NOT_READ = {"pict": "picture", "objdata": "embedded object", "moMath": "formula"}
# Fonts of signs, by their charset and by their names.
_SIGNS, _SIGNS_CHARSET = "signs", 2
_SIGN_FONTS = ("Symbol", "Wingdings", "Webdings", "Monotype Sorts", "ZapfDingbats", "MT Extra")
_BESIDE = {each + which: each for each in ("header", "footer") for which in ("", "l", "r", "f")}
# Text of its own within a paragraph.
_APART = {
    "footnote": "note", "annotation": "span", "shptxt": "div", "dptxbxtext": "div",
    "listtext": "label", "pntext": "label",
}  # fmt: skip
# Kinds and values of form fields.
_CHECKBOX, _BY_DEFAULT = 1, 25
# Boxes in notes in boxes, deeper than anyone writes them.
_MOST_INNER = 20
_MARKS = {
    "super": "sup", "up": "sup", "sub": "sub", "dn": "sub", "strike": "del", "striked": "del",
    "nosupersub": "",
}  # fmt: skip
_MERGED = {"clmrg": "colspan", "clvmrg": "rowspan"}
_CHARACTERS = {
    "tab": TAB, "emdash": "\u2014", "endash": "\u2013", "lquote": "\u2018", "rquote": "\u2019",
    "ldblquote": "\u201c", "rdblquote": "\u201d", "bullet": "\u2022", "~": "\xa0", "_": "-",
    "\\": "\\", "{": "{", "}": "}", "emspace": " ", "enspace": " ", "nestcell": " | ",
}  # fmt: skip
_ENDS = frozenset(("par", "page", "sect", "column", "nestrow", "\n", "\r"))


def rtf_text(data: bytes, tracker: Tracker) -> str:
    """The text of a file, a line for each paragraph and each row of a table. Notes stand where they
    belong, headers come first and footers last.

    Raises:
        ContextError: it is longer than could fit.
    """
    page = _RichText(tracker)
    page.read(data.decode("latin-1"))
    header, footer = (
        "\n".join(dict.fromkeys(text_of(page.beside[kind].body, tracker, gap=1).split("\n")))
        for kind in ("header", "footer")
    )
    return "\n".join(filter(None, (header, text_of(page.body, tracker, gap=1), footer)))


class _Flow:
    """Paragraphs one after another, some in cells.

    Attributes:
        body: the element that holds them.
        paragraph: the one that is being written.
        label: what stands before it in a list.
        level: how deep the list is.
        depth: in how many others it stands.
    """

    def __init__(self, body: Element, depth: int = 0) -> None:
        self.body = body
        self.depth = depth
        self.paragraph = body.makeelement("p")
        self.label, self.level = "", 0
        self._cell = body.makeelement("td")
        self._cells = list[Element]()
        self._table: Element = None
        # The last cell of each column that none above reaches into.
        self._above = dict[int, Element]()

    def put(self, text: str, mark: str) -> None:
        """Add text to the paragraph."""
        text = _NO_TEXT.sub("", whole_characters(text)).replace("  ", SPACE * 2)
        before = next(self.paragraph.iterchildren(reversed=True), None)
        if mark and text.strip():
            self.add(mark).text = text
        elif before is None:
            self.paragraph.text = (self.paragraph.text or "") + text
        else:
            before.tail = (before.tail or "") + text

    def add(self, name: str) -> Element:
        """A new element in the paragraph."""
        self.paragraph.append(self.paragraph.makeelement(name))
        return self.paragraph[-1]

    def end_paragraph(self, *, in_table: bool) -> None:
        """Begin the next paragraph."""
        ended, self.paragraph = self.paragraph, self.body.makeelement("p")
        if self.label:
            ended.text = SPACE * 2 * min(self.level, 8) + self.label + (ended.text or "")
        self.label = ""
        if in_table:
            self._cell.append(ended)
            return
        self.end_row([])
        self._table = None
        self.body.append(ended)

    def end_cell(self) -> None:
        """Begin the next cell."""
        self.end_paragraph(in_table=True)
        self._cells.append(self._cell)
        self._cell = self.body.makeelement("td")

    def end(self) -> None:
        """Write what has no end of its own."""
        if len(self.paragraph) or self.paragraph.text or self.label:
            self.end_paragraph(in_table=False)
        self.end_row([])

    def end_row(self, merged: list[str]) -> None:
        """Begin the next row.

        Args:
            merged: in which attribute of another cell each cell of this row is counted, if any.
        """
        if len(self.paragraph) or self.paragraph.text:
            self.end_paragraph(in_table=True)
        cells = [*self._cells, *([self._cell] if len(self._cell) else [])]
        self._cells, self._cell = [], self.body.makeelement("td")
        if not cells:
            return
        if self._table is None:
            self._table, self._above = self.body.makeelement("table"), {}
            self.body.append(self._table)
        row = self._table.makeelement("tr")
        self._table.append(row)
        for column, (cell, spans) in enumerate(zip_longest(cells, merged[: len(cells)])):
            into = row[-1] if spans == "colspan" and len(row) else self._above.get(column)
            if not spans or into is None or "".join(cell.itertext()).strip():
                row.append(cell)
                self._above[column] = cell
            else:
                into.set(spans, str(int(into.get(spans, "1")) + 1))


@dataclass
class _Group:
    """What holds until the end of a group."""

    flow: _Flow
    skipped: str = ""
    font: int = -1
    mark: str = ""
    hidden: bool = False
    in_table: bool = False
    after_unicode: int = 1


class _RichText:
    """Reads control words.

    Attributes:
        body: the elements of the page.
        beside: headers and footers.
    """

    def __init__(self, tracker: Tracker) -> None:
        from lxml.etree import Element

        self.body = Element("body")
        self.beside = {kind: _Flow(Element("body")) for kind in ("header", "footer")}
        self._tracker = tracker
        self._groups = [_Group(_Flow(self.body))]
        # Whether a row is open, and what cells of it are merged into others.
        self._in_row, self._merged = False, [""]
        self._page = "cp1252"
        self._fonts, self._font_names = dict[int, str](), defaultdict[int, str](str)
        # Of a form's field: its kind, what is chosen, and the choices.
        self._field = dict[str, int]()
        self._choices = list[str]()
        self._bytes = bytearray()
        self._text = list[str]()
        self._written = self._groups[0].flow, ""
        self._to_skip = 0

    def read(self, markup: str) -> None:
        """Read a whole file."""
        at = count = 0
        starred = False
        while found := _TOKEN.match(markup, at):
            at, count = found.end(), count + 1
            if count % _BEAT == 0:
                self._tracker.report(at, len(markup))
            word, number, byte, sign, brace, text = found.groups()
            if byte or text:
                read = (
                    bytes.fromhex(byte) if byte else re.sub(r"[\r\n]", "", text).encode("latin-1")
                )
                skipped = min(self._to_skip, len(read))
                self._to_skip -= skipped
                self._bytes += read[skipped:]
                continue
            self._decode()
            if brace:
                self._to_skip = 0
                self._begin() if brace == "{" else self._end()
            elif word == "bin" and number:
                at += max(0, int(number))
            elif sign != "*":
                self._word(word or sign, None if number is None else int(number), starred)
            starred = sign == "*"
        self._decode()
        while len(self._groups) > 1:
            self._end()
        self._flush()
        self._group.flow.end()

    @property
    def _group(self) -> _Group:
        return self._groups[-1]

    def _begin(self) -> None:
        self._groups.append(replace(self._group))

    def _end(self) -> None:
        if len(self._groups) == 1:
            return
        flow = self._groups.pop().flow
        outer = self._group.flow
        if flow is outer:
            return
        self._flush()
        flow.end()
        if flow.body.tag == "label":
            label = " ".join("".join(flow.body.itertext()).replace(TAB, " ").split())
            # Bullets are signs of fonts such as Symbol.
            label = label if any(map(str.isalnum, label)) else label and "-"
            outer.label = f"{label} " if label else ""
            flow.body.getparent().remove(flow.body)

    def _word(self, word: str, number: int | None, starred: bool) -> None:
        group, is_on = self._group, number != 0
        if word == "ud" and group.skipped == "upr":
            group.skipped = ""
        elif word in _SKIPPED or (starred and word not in _SHOWN) or word == "upr":
            self._choices += [""] * (word == "ffl")
            if not group.skipped:
                self._tracker.not_read[_NOT_READ.get(word, "")] += word in _NOT_READ
            group.skipped = word if word == "ffl" else group.skipped or word
        elif word == "ansicpg" and number:
            self._page = _codec(f"cp{number}", self._page)
        elif word in _PAGES:
            self._page = _PAGES[word]
        elif word in ("f", "deff") and number is not None:
            group.font = number
        elif word == "fcharset" and group.skipped == "fonttbl" and number in _CODECS:
            self._fonts[group.font] = _codec(_CODECS[number], self._page)
        elif word == "fcharset" and group.skipped == "fonttbl" and number == _SIGNS_CHARSET:
            self._fonts[group.font] = _SIGNS
        elif word in ("fftype", "ffres", "ffdefres") and number is not None:
            self._field[word] = number
        elif word == "uc" and number is not None:
            group.after_unicode = max(0, number)
        elif word == "u" and number is not None:
            self._put(chr(number % 0x10000))
            self._to_skip = group.after_unicode
        elif word in _MARKS:
            group.mark = _MARKS[word] if is_on else ""
        elif word in ("v", "deleted"):
            group.hidden = is_on
        elif word == "plain":
            group.mark, group.hidden = "", False
        elif not group.skipped and not group.hidden:
            self._shown(word, number)

    def _shown(self, word: str, number: int | None) -> None:
        """What changes the text, if text is shown here."""
        group = self._group
        if word in _CHARACTERS:
            self._put(_CHARACTERS[word])
        elif word in _APART or word in _BESIDE:
            group.flow, group.mark, group.in_table = self._inner(word), "", False
        elif word == "pard":
            group.in_table, group.flow.level = False, 0
        elif word == "ilvl" and number:
            group.flow.level = number
        elif word == "intbl":
            group.in_table = True
        elif word == "fldrslt":
            self._put(self._filled_in())
        elif word == "trowd":
            self._in_row, self._merged = True, [""]
        elif word in _MERGED:
            self._merged[-1] = _MERGED[word]
        elif word == "cellx":
            self._merged.append("")
        elif word in ("cell", "row", "line", *_ENDS):
            self._flush()
            if word == "cell":
                group.flow.end_cell()
            elif word == "row":
                group.flow.end_row(self._merged)
                self._in_row = False
            elif word == "line":
                group.flow.add("br")
            else:
                group.flow.end_paragraph(in_table=group.in_table or self._in_row)

    def _inner(self, word: str) -> _Flow:
        """Where the text of a group goes that stands apart."""
        flow = self._group.flow
        if word in _BESIDE:
            return self.beside[_BESIDE[word]]
        if flow.depth == _MOST_INNER:
            return flow
        self._flush()
        element = flow.add(_APART[word])
        if word == "annotation":
            element.set("class", "comment-start")
        return _Flow(element, flow.depth + 1)

    def _filled_in(self) -> str:
        """What the field of a form that was read last is filled in with, if it says so."""
        field, choices, self._field, self._choices = self._field, self._choices, {}, []
        chosen = field.get("ffres", _BY_DEFAULT)
        chosen = field.get("ffdefres", 0) if chosen == _BY_DEFAULT else chosen
        if field.get("fftype") == _CHECKBOX:
            return "[x]" if chosen else "[ ]"
        return choices[chosen] if 0 <= chosen < len(choices) else ""

    def _decode(self) -> None:
        """Write the bytes so far: some encodings take two for a character."""
        if not self._bytes:
            return
        group = self._group
        name, font = self._fonts.get(group.font, self._page), self._font_names[group.font]
        if group.skipped == "fonttbl":
            self._font_names[group.font] += self._bytes.decode("latin-1").strip(" ;")
        elif group.skipped == "ffl":
            self._choices[-1] += self._bytes.decode(_codec(name, self._page), "replace")
        elif group.skipped == "fldinst":
            self._tracker.not_read["formula"] += self._bytes.lstrip().startswith(b"EQ ")
        # Some fonts that say they are of signs have letters, too.
        elif (
            name == _SIGNS and font.startswith(_SIGN_FONTS) and not (group.skipped or group.hidden)
        ):
            signs = "".join(chr(0xF000 + each) for each in self._bytes if each > 0x20)
            text, unknown = shown_in("Symbol" if font.startswith("Symbol") else None, signs)
            is_label = group.flow.body.tag == "label"
            self._tracker.not_read["symbol"] += 0 if is_label else unknown
            self._put(text or "\u2022" * is_label)
        else:
            self._put(self._bytes.decode(_codec(name, self._page), "replace"))
        self._bytes.clear()

    def _put(self, text: str) -> None:
        group = self._group
        if group.skipped or group.hidden:
            return
        if self._written != (group.flow, group.mark):
            self._flush()
            self._written = group.flow, group.mark
        self._text.append(text)

    def _flush(self) -> None:
        """Hand on the text so far: halves of characters beyond the first 65,536 come one by one."""
        flow, mark = self._written
        if self._text:
            flow.put("".join(self._text), mark)
        self._text = []


def _codec(name: str, other: str) -> str:
    try:
        return codecs.lookup(name).name
    except LookupError:
        return other
