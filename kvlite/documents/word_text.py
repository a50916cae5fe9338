"""The text of one part of a Word document, built from its markup in order."""

from collections import defaultdict
from dataclasses import dataclass, field

from kvlite.documents.archive import Attributes
from kvlite.documents.tracker import Tracker
from kvlite.documents.word_lists import Lists

# Most of the markup, and nothing to read in it.
_FORMATTING = frozenset(("w:pPr", "w:r", "w:rPr", "w:rFonts", "w:color", "w:sz", "w:lang"))
# Deleted text (all changes are accepted), how a word is pronounced, and definitions of tab stops.
_SKIPPED = frozenset(("w:del", "w:moveFrom", "w:rt", "w:tabs"))
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
# A cell merged with those below it is repeated in each of their rows up to this length: a label.
_LABEL = 200


@dataclass
class Notes:
    """Footnotes, endnotes and comments.

    Attributes:
        texts: by kind and id.
        numbers: by kind, then id, in the order in which the text refers to them.
    """

    texts: dict[tuple[str, str], str] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))


@dataclass
class _Paragraph:
    pieces: list[str] = field(default_factory=list)
    lines_after: list[str] = field(default_factory=list)
    style: str = ""
    number: str | None = None
    level: str | None = None


@dataclass
class _Table:
    """The current row's cells, and cells of earlier rows that reach into it, by column."""

    cells: list[str] = field(default_factory=list)
    above: dict[int, str] = field(default_factory=dict)
    column: int = 0
    span: int = 1
    merged: str | None = None


class WordText:
    """Collects text from the parser's events.

    Attributes:
        references: ids of the headers and footers that sections name.
    """

    def __init__(self, tracker: Tracker, *, notes: Notes, lists: Lists | None = None) -> None:
        self.tracker = tracker
        self.references: dict[str, list[str]] = {"header": [], "footer": []}
        self._notes, self._lists = notes, lists
        self._skipped = 0
        self._in_text = False
        self._in_object = 0
        self._chosen = list[bool]()
        self._description = ""
        self._note, self._author = "", ""
        # Lines of the document, and of the cells, boxes and notes that are open.
        self._lines: list[list[str]] = [[]]
        # The first of each holds what stands outside any.
        self._paragraphs = [_Paragraph()]
        self._tables = [_Table()]

    def lines(self) -> list[str]:
        """The whole text, once the part was read to its end."""
        outside = self._paragraphs[0]
        stray = "".join(outside.pieces)
        return [*self._lines[0], *([stray] if stray.strip() else []), *outside.lines_after]

    def characters(self, text: str) -> None:
        """Add text, if it is shown."""
        if self._in_text and not self._skipped:
            self._put(text)

    def begin(self, tag: str, attributes: Attributes) -> None:
        """Enter an element."""
        if tag in _FORMATTING:
            return
        skipped = tag in _SKIPPED or tag.endswith("PrChange")  # former properties
        if self._skipped or skipped or self._is_second_choice(tag):
            self._skipped += 1
            return
        paragraph, table = self._paragraphs[-1], self._tables[-1]
        match tag:
            case "w:t" | "m:t" | "a:t":
                self._in_text = True
            case "w:p" | "a:p":
                self._paragraphs.append(_Paragraph())
            case "w:pStyle":
                paragraph.style = attributes.get("w:val", "")
            case "w:numId":
                paragraph.number = attributes.get("w:val")
            case "w:ilvl":
                paragraph.level = attributes.get("w:val")
            case "w:tbl":
                self._tables.append(_Table())
            case "w:tr":
                table.cells, table.column = [], 0
            case "w:tc":
                self._lines.append([])
                table.span, table.merged = 1, None
            case "w:gridSpan":
                table.span = int(attributes.get("w:val", "1"))
            case "w:vMerge":
                table.merged = attributes.get("w:val", "continue")
            case "w:txbxContent":
                self._lines.append([])
            case "w:br":
                if attributes.get("w:type", "textWrapping") == "textWrapping":
                    self._put("\n")
            case "w:sym":
                self._symbol(attributes)
            case "m:chr":
                self._put(attributes.get("m:val", ""))
            case "wp:docPr" | "v:shape":
                description = attributes.get("descr", attributes.get("alt", ""))
                self._description = " ".join(description.split())
            case "v:textpath":
                paragraph.lines_after.append(attributes.get("string", ""))
            case "pic:pic" | "v:imagedata":
                if not self._in_object:
                    self.tracker.not_read["picture"] += 1
                self._describe()
            case "w:object":
                self._in_object += 1
            case "w:footnote" | "w:endnote" | "w:comment":
                self._begin_note(attributes)
            case "w:footnoteReference" | "w:endnoteReference" | "w:commentReference":
                self._refer(_kind(tag), attributes.get("w:id", ""))
            case "w:headerReference" | "w:footerReference":
                self.references[_kind(tag)].append(attributes.get("r:id", ""))
            case _ if tag in _CHARACTERS:
                self._put(_CHARACTERS[tag])
            case _ if tag in _NOT_READ:
                self.tracker.not_read[_NOT_READ[tag]] += 1

    def end(self, tag: str) -> None:
        """Leave an element."""
        if tag in _FORMATTING:
            return
        if self._skipped:
            self._skipped -= 1
            return
        match tag:
            case "w:t" | "m:t" | "a:t":
                self._in_text = False
            case "w:p" | "a:p":
                self._end_paragraph()
            case "w:tbl":
                self._tables.pop()
            case "w:tr":
                if len(self._tables) > 1:
                    self._add_line(" | ".join(self._tables[-1].cells))
            case "w:tc":
                self._end_cell()
            case "w:txbxContent":
                lines = [line for line in self._lines.pop() if line.strip()]
                self._paragraphs[-1].lines_after += lines
            case "w:drawing" | "w:pict":
                self._describe()
            case "w:object":
                self._in_object -= 1
            case "w:footnote" | "w:endnote" | "w:comment":
                self._end_note(_kind(tag))
            case "mc:AlternateContent":
                self._chosen.pop()
            case _ if tag in _CLOSING:
                self._put(_CLOSING[tag])

    def _put(self, text: str) -> None:
        self._paragraphs[-1].pieces.append(text)

    def _add_line(self, line: str) -> None:
        if len(self._lines) == 1:
            self.tracker.add_characters(len(line) + 1)
        self._lines[-1].append(line)

    def _is_second_choice(self, tag: str) -> bool:
        """Whether an element is another form of what was read already."""
        if tag == "mc:AlternateContent":
            self._chosen.append(False)
        if tag not in ("mc:Choice", "mc:Fallback") or not self._chosen:
            return False
        former, self._chosen[-1] = self._chosen[-1], True
        return former

    def _end_paragraph(self) -> None:
        done = self._paragraphs.pop()
        text = "".join(done.pieces)
        if self._lists is not None:
            mark = self._lists.mark(done.style, done.number, done.level)
            self.tracker.not_read["list number"] += mark is None
            text = (mark or "") + text if text.strip() else text
        for line in (text, *done.lines_after):
            self._add_line(line)

    def _end_cell(self) -> None:
        text, table = self._in_one_line(), self._tables[-1]
        if table.merged == "continue":
            text = table.above.get(table.column, text)
        table.above.pop(table.column, None)
        if table.merged is not None and len(text) <= _LABEL:
            table.above[table.column] = text
        table.cells.append(text)
        table.column += table.span

    def _in_one_line(self) -> str:
        """The lines of the cell or note that ends."""
        return " ".join(" ".join(self._lines.pop()).split())

    def _symbol(self, attributes: Attributes) -> None:
        character = chr(int(attributes.get("w:char", "FFFD"), 16))
        if "\ue000" <= character <= "\uf8ff":  # private use: only the font knows what it shows
            self.tracker.not_read["symbol"] += 1
        else:
            self._put(character)

    def _describe(self) -> None:
        if self._description:
            self._put(f"[Picture: {self._description}]")
        self._description = ""

    def _begin_note(self, attributes: Attributes) -> None:
        shown = attributes.get("w:type", "normal") == "normal"  # not the line above all notes
        self._note = attributes.get("w:id", "") if shown else ""
        self._author = attributes.get("w:author", "")
        self._lines.append([])

    def _end_note(self, kind: str) -> None:
        text = self._in_one_line()
        by = f" by {self._author}" if self._author else ""
        if self._note:
            note = f"[Comment{by}: {text}]" if kind == "comment" else text
            self._notes.texts[kind, self._note] = note

    def _refer(self, kind: str, note: str) -> None:
        """Mark where a note belongs; the note follows the first paragraph that refers to it."""
        numbers = self._notes.numbers[kind]
        is_first = note not in numbers
        number = numbers.setdefault(note, len(numbers) + 1)
        mark = {"footnote": f"[{number}]", "endnote": f"[endnote {number}]"}.get(kind, "")
        self._put(mark)
        if not is_first:
            return
        text = self._notes.texts.pop((kind, note), None)
        if text is None:
            self.tracker.not_read[kind] += 1
        else:
            self._paragraphs[-1].lines_after.append(f"{mark} {text}" if mark else text)


def _kind(tag: str) -> str:
    return tag.removeprefix("w:").removesuffix("Reference")
