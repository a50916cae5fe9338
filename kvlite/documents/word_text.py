"""What a part of a Word document reads as, told from its markup in order."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvlite.documents.following import Following
from kvlite.documents.word_lists import Lists

Attributes = dict[str, str]

_OFFICE, _STRICT = "http://schemas.openxmlformats.org/", "http://purl.oclc.org/ooxml/"
_NAMESPACES = {
    "wordprocessingml/2006/main": "w",
    "wordprocessingml/main": "w",
    "officeDocument/2006/math": "m",
    "officeDocument/math": "m",
    "officeDocument/2006/relationships": "r",
    "officeDocument/relationships": "r",
    "drawingml/2006/main": "a",
    "drawingml/main": "a",
    "drawingml/2006/picture": "pic",
    "drawingml/picture": "pic",
    "drawingml/2006/wordprocessingDrawing": "wp",
    "drawingml/wordprocessingDrawing": "wp",
    "drawingml/2006/chart": "c",
    "http://schemas.microsoft.com/office/drawing/2014/chartex": "cx",
    "drawingml/chart": "c",
    "drawingml/2006/diagram": "dgm",
    "drawingml/diagram": "dgm",
    "markup-compatibility/2006": "mc",
    "urn:schemas-microsoft-com:vml": "v",
    "urn:schemas-microsoft-com:office:office": "o",
}
# What Word does not show with all changes accepted, how a word is pronounced, and tab stops.
_PASSED_OVER = frozenset(("w:del", "w:moveFrom", "w:rt", "w:tabs"))
_TEXT = frozenset(("w:t", "m:t", "a:t"))
_CHARACTERS = {
    "w:tab": "\t",
    "w:ptab": "\t",
    "w:cr": "\n",
    "w:noBreakHyphen": "-",
    "m:num": "(",
    "m:den": "/(",
    "m:sup": "^(",
    "m:sub": "_(",
    "m:rad": "√",
    "m:d": "(",
    "m:mr": " ",
}
_CLOSING = {"m:num": ")", "m:den": ")", "m:sup": ")", "m:sub": ")", "m:d": ")", "m:mr": ";"}
_NOT_READ = {
    "c:chart": "chart",
    "cx:chart": "chart",
    "dgm:relIds": "diagram",
    "o:OLEObject": "embedded object",
    "w:altChunk": "embedded document",
    "w:subDoc": "embedded document",
}
# A cell merged with those below it stands in each of their rows, as long as it is a label.
_LABEL = 200


def _passed_over(tag: str) -> bool:
    return tag in _PASSED_OVER or tag.endswith("PrChange")  # what properties were before


def local_names() -> Callable[[str], str]:
    """Names of elements as people write them, `w:p`, from those that a parser gives, in either of
    the two standards' namespaces."""
    known = dict[str, str]()

    def local(name: str) -> str:
        if name not in known:
            space, _, own = name.rpartition(" ")
            short = _NAMESPACES.get(space.removeprefix(_OFFICE).removeprefix(_STRICT), "?")
            known[name] = f"{short}:{own}" if space else own
        return known[name]

    return local


@dataclass
class Notes:
    """What a document's text refers to.

    Attributes:
        texts: of notes, by their kind and id.
        numbers: that were given to those that were referred to.
    """

    texts: dict[tuple[str, str], str] = field(default_factory=dict)
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass
class _Paragraph:
    """A paragraph, and the lines that are to follow it."""

    pieces: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    style: str = ""
    number: str | None = None
    level: str | None = None


@dataclass
class _Table:
    """A table at some row: its cells so far, and those above that reach into it by column."""

    cells: list[str] = field(default_factory=list)
    above: dict[int, str] = field(default_factory=dict)
    column: int = 0
    span: int = 1
    merged: str | None = None


class WordText:
    """Takes markup as a parser tells it.

    Attributes:
        references: the ids of "header"s and "footer"s that sections name.
    """

    def __init__(self, following: Following, *, notes: Notes, lists: Lists | None = None) -> None:
        self.following = following
        self.references: dict[str, list[str]] = {"header": [], "footer": []}
        self._notes, self._lists = notes, lists
        self._skipped = 0
        self._taking = False
        self._in_object = 0
        self._chosen = list[bool]()
        self._described = ""
        self._note, self._author = "", ""
        self._holders: list[list[str]] = [[]]
        self._paragraphs = [_Paragraph()]  # text that is in none
        self._tables = list[_Table]()

    def lines(self) -> list[str]:
        """All of it, once it is told."""
        stray = "".join(self._paragraphs[0].pieces)
        return [*self._holders[0], *([stray] if stray.strip() else []), *self._paragraphs[0].after]

    def characters(self, text: str) -> None:
        """Take characters."""
        if self._taking and not self._skipped:
            self._put(text)

    def begin(self, tag: str, attributes: Attributes) -> None:
        """Take an element's beginning."""
        if self._skipped or _passed_over(tag) or self._is_second_choice(tag):
            self._skipped += 1
            return
        if tag in _TEXT:
            self._taking = True
        elif tag in _CHARACTERS:
            self._put(_CHARACTERS[tag])
        elif tag in _NOT_READ:
            self.following.not_read[_NOT_READ[tag]] += 1
        elif tag in _BEGIN:
            _BEGIN[tag](self, attributes)

    def end(self, tag: str) -> None:
        """Take an element's end."""
        if self._skipped:
            self._skipped -= 1
            return
        if tag in _TEXT:
            self._taking = False
        elif tag in _CLOSING:
            self._put(_CLOSING[tag])
        elif tag in _END:
            _END[tag](self)

    def _put(self, text: str) -> None:
        self._paragraphs[-1].pieces.append(text)

    def _is_second_choice(self, tag: str) -> bool:
        """Whether it is another form of what was read already."""
        if tag == "mc:AlternateContent":
            self._chosen.append(False)
        if tag not in ("mc:Choice", "mc:Fallback") or not self._chosen:
            return False
        former, self._chosen[-1] = self._chosen[-1], True
        return former

    def _end_choice(self) -> None:
        self._chosen.pop()

    def _begin_paragraph(self, _: Attributes) -> None:
        self._paragraphs.append(_Paragraph())

    def _style(self, attributes: Attributes) -> None:
        self._paragraphs[-1].style = attributes.get("w:val", "")

    def _list(self, attributes: Attributes) -> None:
        self._paragraphs[-1].number = attributes.get("w:val")

    def _level(self, attributes: Attributes) -> None:
        self._paragraphs[-1].level = attributes.get("w:val")

    def _end_paragraph(self) -> None:
        done = self._paragraphs.pop()
        text = "".join(done.pieces)
        if self._lists is not None:
            mark = self._lists.mark(done.style, done.number, done.level)
            self.following.not_read["list number"] += mark is None
            text = (mark or "") + text if text.strip() else text
        for line in (text, *done.after):
            if len(self._holders) == 1:
                self.following.came_out(len(line) + 1)
            self._holders[-1].append(line)

    def _begin_table(self, _: Attributes) -> None:
        self._tables.append(_Table())

    def _end_table(self) -> None:
        self._tables.pop()

    def _begin_row(self, _: Attributes) -> None:
        if self._tables:
            self._tables[-1].cells, self._tables[-1].column = [], 0

    def _end_row(self) -> None:
        if self._tables:
            line = " | ".join(self._tables[-1].cells)
            if len(self._holders) == 1:
                self.following.came_out(len(line) + 1)
            self._holders[-1].append(line)

    def _begin_cell(self, _: Attributes) -> None:
        self._holders.append([])
        if self._tables:
            self._tables[-1].span, self._tables[-1].merged = 1, None

    def _span(self, attributes: Attributes) -> None:
        if self._tables:
            self._tables[-1].span = int(attributes.get("w:val", "1"))

    def _merge(self, attributes: Attributes) -> None:
        if self._tables:
            self._tables[-1].merged = attributes.get("w:val", "continue")

    def _end_cell(self) -> None:
        text = " ".join(" ".join(self._holders.pop()).split())
        if not self._tables:
            return
        table = self._tables[-1]
        if table.merged == "continue":
            text = table.above.get(table.column, text)
        table.above.pop(table.column, None)
        if table.merged is not None and len(text) <= _LABEL:
            table.above[table.column] = text
        table.cells.append(text)
        table.column += table.span

    def _begin_box(self, _: Attributes) -> None:
        self._holders.append([])

    def _end_box(self) -> None:
        self._paragraphs[-1].after += [line for line in self._holders.pop() if line.strip()]

    def _break(self, attributes: Attributes) -> None:
        if attributes.get("w:type", "textWrapping") == "textWrapping":
            self._put("\n")

    def _symbol(self, attributes: Attributes) -> None:
        character = chr(int(attributes.get("w:char", "FFFD"), 16))
        if "\ue000" <= character <= "\uf8ff":  # which character it is, only its font knows
            self.following.not_read["symbol"] += 1
        else:
            self._put(character)

    def _operator(self, attributes: Attributes) -> None:
        self._put(attributes.get("m:val", ""))

    def _description(self, attributes: Attributes) -> None:
        self._described = " ".join(attributes.get("descr", attributes.get("alt", "")).split())

    def _word_art(self, attributes: Attributes) -> None:
        self._paragraphs[-1].after.append(attributes.get("string", ""))

    def _picture(self, _: Attributes) -> None:
        if not self._in_object:
            self.following.not_read["picture"] += 1
        self._describe()

    def _describe(self) -> None:
        if self._described:
            self._put(f"[Picture: {self._described}]")
        self._described = ""

    def _begin_object(self, _: Attributes) -> None:
        self._in_object += 1

    def _end_object(self) -> None:
        self._in_object -= 1

    def _begin_note(self, attributes: Attributes) -> None:
        shown = attributes.get("w:type", "normal") == "normal"  # not the line above all notes
        self._note = attributes.get("w:id", "") if shown else ""
        self._author = attributes.get("w:author", "")
        self._holders.append([])

    def _end_note(self, kind: str) -> None:
        text = " ".join(" ".join(self._holders.pop()).split())
        by = f" by {self._author}" if self._author else ""
        if self._note:
            said = f"[Comment{by}: {text}]" if kind == "comment" else text
            self._notes.texts[kind, self._note] = said

    def _refer(self, kind: str, attributes: Attributes) -> None:
        """Mark where a note belongs, and let it follow the paragraph."""
        key, notes = (kind, attributes.get("w:id", "")), self._notes
        known = key in notes.numbers
        if not known:
            notes.count[kind] += 1
            notes.numbers[key] = notes.count[kind]
        number = notes.numbers[key]
        mark = {"footnote": f"[{number}]", "endnote": f"[endnote {number}]"}.get(kind, "")
        self._put(mark)
        if not known and key not in notes.texts:
            self.following.not_read[kind] += 1
        elif not known:
            text = notes.texts.pop(key)
            self._paragraphs[-1].after.append(f"{mark} {text}" if mark else text)

    def _section(self, kind: str, attributes: Attributes) -> None:
        self.references[kind].append(attributes.get("r:id", ""))


_BEGIN: dict[str, Callable[[WordText, Attributes], None]] = {
    "w:p": WordText._begin_paragraph,
    "a:p": WordText._begin_paragraph,
    "w:pStyle": WordText._style,
    "w:numId": WordText._list,
    "w:ilvl": WordText._level,
    "w:tbl": WordText._begin_table,
    "w:tr": WordText._begin_row,
    "w:tc": WordText._begin_cell,
    "w:gridSpan": WordText._span,
    "w:vMerge": WordText._merge,
    "w:txbxContent": WordText._begin_box,
    "w:br": WordText._break,
    "w:sym": WordText._symbol,
    "m:chr": WordText._operator,
    "wp:docPr": WordText._description,
    "v:shape": WordText._description,
    "v:textpath": WordText._word_art,
    "pic:pic": WordText._picture,
    "v:imagedata": WordText._picture,
    "w:object": WordText._begin_object,
    "w:footnote": WordText._begin_note,
    "w:endnote": WordText._begin_note,
    "w:comment": WordText._begin_note,
    "w:footnoteReference": lambda own, given: own._refer("footnote", given),
    "w:endnoteReference": lambda own, given: own._refer("endnote", given),
    "w:commentReference": lambda own, given: own._refer("comment", given),
    "w:headerReference": lambda own, given: own._section("header", given),
    "w:footerReference": lambda own, given: own._section("footer", given),
}
_END: dict[str, Callable[[WordText], None]] = {
    "mc:AlternateContent": WordText._end_choice,
    "w:p": WordText._end_paragraph,
    "a:p": WordText._end_paragraph,
    "w:tbl": WordText._end_table,
    "w:tr": WordText._end_row,
    "w:tc": WordText._end_cell,
    "w:txbxContent": WordText._end_box,
    "w:drawing": WordText._describe,
    "w:pict": WordText._describe,
    "w:object": WordText._end_object,
    "w:footnote": lambda own: own._end_note("footnote"),
    "w:endnote": lambda own: own._end_note("endnote"),
    "w:comment": lambda own: own._end_note("comment"),
}
