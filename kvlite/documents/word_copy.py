"""A part of a Word document, copied for pandoc: without formatting and with everything in its place
that pandoc leaves out: numbers of lists, text boxes, comments, fields that were filled in."""

import re
from dataclasses import dataclass
from html import escape

from kvlite.documents.archive import Attributes
from kvlite.documents.pandoc import LETTERS
from kvlite.documents.pandoc_text import LABEL, LABELLED, LEVEL, MARKS, SPACE, TAB
from kvlite.documents.tracker import Tracker
from kvlite.documents.word_lists import Lists

# Deleted text (all changes are accepted), how a word is pronounced, definitions of tab stops.
_SKIPPED = frozenset(("w:del", "w:moveFrom", "w:rt", "w:tabs", "w:sectPrChange", "m:ctrlPr"))
_COPIED = frozenset(("w:r", "w:rPr", "w:tcPr", "w:vertAlign", "w:strike", "w:dstrike"))
_TEXTS = {"w:tab": TAB, "w:ptab": TAB, "w:noBreakHyphen": "-"}
_REFERENCES = ("footnote", "endnote", "comment", "header", "footer")
_ASIDE = frozenset(
    ("w:footnote", "w:endnote", "w:comment", *(f"w:{kind}Reference" for kind in _REFERENCES))
)
_NOT_READ = {
    "c:chart": "chart",
    "cx:chart": "chart",
    "dgm:relIds": "diagram",
    "o:OLEObject": "embedded object",
    "w:altChunk": "embedded document",
    "w:subDoc": "embedded document",
}
# Tables in cells, and elements of a formula, deeper than anyone writes them.
_MOST_TABLES, _MOST_MATH = 20, 100
_MOST_COLUMNS = 1000
_NOT_TEXT = f"[\0-\x08\x0b-\x1f\ufffe\uffff]|{MARKS}"
_OFF = ("0", "false", "off")


@dataclass
class _Table:
    """A table that is open: where its columns are to be written, and how many they are."""

    at: int
    column: int = 0
    columns: int = 0


class WordCopy:
    """Collects a copy from the parser's events.

    Attributes:
        blocks: paragraphs and tables that stand in no other.
        pieces: all text, in order.
        comments: the text of each, by its id.
        notes: ids of the notes that are defined here.
        references: ids of the headers and footers that sections name, and of notes.
    """

    def __init__(
        self, tracker: Tracker, *, comments: dict[str, str], lists: Lists | None = None
    ) -> None:
        self.tracker, self.comments, self._lists = tracker, comments, lists
        self.blocks, self.pieces, self.notes = list[str](), list[str](), set[str]()
        self.references: dict[str, list[str]] = {
            kind: [] for kind in ("header", "footer", "footnote", "endnote")
        }
        self._skipped = self._math = self._in_object = 0
        self._tables = list[_Table]()
        self._in_text = self._hidden = self._in_note = False
        self._chosen = list[bool]()
        self._controls = list[bool]()
        self._description = ""
        self._parts = list[str]()
        # What was open around each text box, and what follows each open paragraph.
        self._around = list[list[str]]()
        self._after = list[list[str]]()
        self._numbering: dict[str, str] = {}
        self._choices: list[str] | None = None
        self._choice = 0
        self._comment, self._comment_from = ("", ""), 0

    def characters(self, text: str) -> None:
        """Add text, if it is shown."""
        if self._in_text and not (self._skipped or self._hidden or any(self._controls)):
            text = re.sub(_NOT_TEXT, "", text)
            if not self._math or len(text.strip()) > LETTERS:
                self.pieces.append(text)
            self.tracker.add_characters(len(text))
            self._parts.append(escape(text, quote=False).replace("  ", SPACE * 2))

    def begin(self, tag: str, attributes: Attributes) -> None:
        """Enter an element."""
        beside = tag == "w:rPr" and self._parts[-1:] != ["<w:r>"] and not self._math
        former = tag in _SKIPPED or tag.endswith("PrChange") or beside
        if self._skipped or former or self._is_second(tag):
            self._skipped += 1
            return
        value = attributes.get("w:val", "")
        if self._math or tag == "m:oMath":
            self._begin_math(tag, attributes)
            return
        match tag:
            case "w:t":
                self._in_text = True
                self._parts.append('<w:t xml:space="preserve">')
            case "a:t":
                self._in_text = True
                self._parts.append('<w:r><w:t xml:space="preserve">')
            case "w:p":
                self._begin_paragraph()
            case "w:txbxContent" | "a:p":
                self._around.append(self._parts)
                self._parts = []
                if tag == "a:p":
                    self._begin_paragraph()
            case "w:pStyle" | "w:numId" | "w:ilvl":
                self._numbering[tag] = value
            case "w:vanish":
                self._hidden = value not in _OFF
            case "w:tbl" | "w:vMerge":
                self._begin_in_table(tag, value)
            case "w:tr" | "w:gridBefore" | "w:tc" | "w:gridSpan" if self._tables:
                self._begin_in_table(tag, value)
            case "w:br":
                if attributes.get("w:type", "textWrapping") == "textWrapping":
                    self._parts.append("<w:br/>")
            case "w:cr":
                self._parts.append("<w:br/>")
            case "w:sym":
                self._symbol(attributes)
            case _ if tag in _ASIDE:
                self._begin_aside(tag, attributes)
            case "w:sdt":
                self._controls.append(False)
            case "w:showingPlcHdr":
                self._controls[-1:] = [value not in _OFF]
            case "w:ddList" | "w:checkBox":
                self._choices, self._choice = [], 0
            case "w:result" | "w:default" | "w:checked":
                chosen = value if tag != "w:checked" else "0" if value in _OFF else "1"
                self._choice = int(chosen) if chosen.isdecimal() else 0
            case "w:listEntry" if self._choices is not None:
                self._choices.append(value)
            case "wp:docPr" | "v:shape":
                description = attributes.get("descr", attributes.get("alt", ""))
                self._description = " ".join(description.split())
            case "v:textpath" if self._after:
                self._after[-1].append(_paragraph(attributes.get("string", "")))
            case "pic:pic" | "v:imagedata":
                if not self._in_object:
                    self.tracker.not_read["picture"] += 1
                self._describe()
            case "w:object":
                self._in_object += 1
            case _ if tag in _TEXTS:
                self._put(_TEXTS[tag])
            case _ if tag in _NOT_READ:
                self.tracker.not_read[_NOT_READ[tag]] += 1
            case _ if tag in _COPIED:
                self._copy(tag, f' w:val="{escape(value)}"' if value else "")

    def end(self, tag: str) -> None:
        """Leave an element."""
        if self._skipped:
            self._skipped -= 1
            return
        if self._math:
            self._end_math(tag)
            return
        match tag:
            case "w:t":
                self._in_text = False
                self._parts.append("</w:t>")
            case "a:t":
                self._in_text = False
                self._parts.append("</w:t></w:r>")
            case "w:p":
                self._end_paragraph()
            case "w:txbxContent" | "a:p":
                if tag == "a:p":
                    self._end_paragraph()
                box, self._parts = self._parts, self._around.pop()
                (self._after[-1] if self._after else self._parts).append("".join(box))
            case "w:pPr":
                self._number()
            case "w:r":
                self._hidden = False
                self._copy(tag, end=True)
            case "w:tbl":
                if self._tables:
                    table = self._tables.pop()
                    columns = '<w:gridCol w:w="1"/>' * table.columns
                    self._parts[table.at] = f"<w:tblGrid>{columns}</w:tblGrid>"
                    self._copy(tag, end=True)
                self._end_block()
            case "w:tr" if self._tables:
                self._tables[-1].columns = max(self._tables[-1].columns, self._tables[-1].column)
                self._copy(tag, end=True)
            case "w:footnote" | "w:endnote":
                self._parts.append(f"</{tag}>")
                self._in_note = False
                self._end_block()
            case "w:comment":
                said = " ".join("".join(self.pieces[self._comment_from :]).split())
                id, by = self._comment
                self.comments[id] = f" [Comment{by}: {said}]"
            case "w:sdt":
                self._controls.pop()
            case "w:ddList" | "w:checkBox":
                self._choose(tag)
            case "w:drawing" | "w:pict":
                self._describe()
            case "w:object":
                self._in_object -= 1
            case "mc:AlternateContent":
                self._chosen.pop()
            case _ if tag in _COPIED or (tag == "w:tc" and self._tables):
                self._copy(tag, end=True)

    def _begin_in_table(self, tag: str, value: str) -> None:
        """Enter a table, or a part of one; "w:vMerge" may stand outside."""
        match tag:
            case "w:tbl":
                self._copy(tag)
                self._tables.append(_Table(len(self._parts)))
                self._parts.append("")
            case "w:tr":
                self._tables[-1].column = 0
                self._copy(tag)
            case "w:gridBefore":
                for _ in range(min(int(value or 0), _MOST_COLUMNS)):
                    self._tables[-1].column += 1
                    self._copy("w:tc")
                    self._parts.append("<w:p/>")
                    self._copy("w:tc", end=True)
            case "w:tc":
                self._tables[-1].column += 1
                self._copy(tag)
            case "w:gridSpan":
                span = max(1, min(int(value or 1), _MOST_COLUMNS))
                self._tables[-1].column += span - 1
                self._copy(tag, f' w:val="{span}"', closed=True)
            case "w:vMerge":
                self._copy(tag, f' w:val="{escape(value or "continue")}"', closed=True)

    def _begin_aside(self, tag: str, attributes: Attributes) -> None:
        """Enter a note, a comment, or what refers to one, to a header or to a footer."""
        match tag:
            case "w:footnote" | "w:endnote":
                self._in_note = True
                self.notes.add(attributes.get("w:id", ""))
                self._parts.append(f'<{tag} w:id="{escape(attributes.get("w:id", ""))}">')
            case "w:footnoteReference" | "w:endnoteReference":
                note = attributes.get("w:id", "")
                self.references[_kind(tag)].append(note)
                self._parts.append(f'<{tag} w:id="{escape(note)}"/>')
            case "w:comment":
                by = attributes.get("w:author", "")
                self._comment = attributes.get("w:id", ""), f" by {by}" if by else ""
                self._comment_from = len(self.pieces)
            case "w:commentReference":
                if (id := attributes.get("w:id", "")) in self.comments:
                    self._put(self.comments.pop(id))
            case "w:headerReference" | "w:footerReference":
                self.references[_kind(tag)].append(attributes.get("r:id", ""))

    def _copy(
        self, tag: str, attributes: str = "", *, end: bool = False, closed: bool = False
    ) -> None:
        if len(self._tables) <= _MOST_TABLES or tag not in _TABLES:
            self._parts.append(f"</{tag}>" if end else f"<{tag}{attributes}{'/' * closed}>")

    def _put(self, text: str) -> None:
        """Add text to the run that is open."""
        if not self._hidden and not any(self._controls):
            self.pieces.append(text)
            escaped = escape(text, quote=False)
            self._parts.append(f'<w:t xml:space="preserve">{escaped}</w:t>')

    def _begin_paragraph(self) -> None:
        self._after.append([])
        self._parts.append("<w:p>")
        self._numbering = {}

    def _end_paragraph(self) -> None:
        self._parts += ["</w:p>", *self._after.pop()]
        self.pieces.append("\n")
        self._end_block()

    def _end_block(self) -> None:
        if not (self._tables or self._after or self._around or self._in_note):
            self.blocks.append("".join(self._parts))
            self._parts = []

    def _number(self) -> None:
        """Write the number of a paragraph in a list, indented by its level."""
        if self._lists is None:
            return
        style, number, level = map(self._numbering.get, ("w:pStyle", "w:numId", "w:ilvl"))
        mark = self._lists.mark(style or "", number, level)
        self.tracker.not_read["list number"] += mark is None
        if mark:
            indent = LEVEL * min(int(level or 0), 9)
            self._parts.append(f"<w:r><w:t>{LABEL}{indent}{escape(mark)}{LABELLED}</w:t></w:r>")

    def _is_second(self, tag: str) -> bool:
        """Whether an element is another form of what was read already."""
        if tag == "mc:AlternateContent":
            self._chosen.append(False)
        if tag not in ("mc:Choice", "mc:Fallback") or not self._chosen:
            return False
        former, self._chosen[-1] = self._chosen[-1], True
        return former

    def _begin_math(self, tag: str, attributes: Attributes) -> None:
        self._math += 1
        if tag == "m:t":
            self._in_text = True
        if tag.startswith("m:") and self._math < _MOST_MATH:
            value = attributes.get("m:val")
            self._parts.append(f"<{tag}>" if value is None else f'<{tag} m:val="{escape(value)}">')

    def _end_math(self, tag: str) -> None:
        if tag == "m:t":
            self._in_text = False
        if tag.startswith("m:") and self._math < _MOST_MATH:
            self._parts.append(f"</{tag}>")
        self._math -= 1

    def _symbol(self, attributes: Attributes) -> None:
        character = chr(int(attributes.get("w:char", "FFFD"), 16))
        if "\ue000" <= character <= "\uf8ff":  # private use: only the font knows what it shows
            self.tracker.not_read["symbol"] += 1
        else:
            self._put(character)

    def _choose(self, tag: str) -> None:
        """Write what a form field was filled in with."""
        entries = self._choices or []
        if tag == "w:checkBox":
            self._put("[x]" if self._choice else "[ ]")
        elif self._choice < len(entries):
            self._put(entries[self._choice])
        self._choices = None

    def _describe(self) -> None:
        if self._description:
            self._put(f"[Picture: {self._description}]")
        self._description = ""


_TABLES = frozenset(("w:tbl", "w:tr", "w:tc", "w:tcPr", "w:gridSpan", "w:vMerge"))


def _paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{escape(text)}</w:t></w:r></w:p>"


def _kind(tag: str) -> str:
    return tag.removeprefix("w:").removesuffix("Reference")
