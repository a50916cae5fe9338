"""Excel workbooks in XML (.xlsx, .xlsm): what a reader sees of each cell that is stored."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from lxml import etree

from kvlite.documents.archive import Archive
from kvlite.documents.grid import Grid
from kvlite.documents.markup import text_of
from kvlite.documents.number_format import BUILT_IN, formatted, simplified
from kvlite.documents.office import relations
from kvlite.documents.tracker import Tracker

Element = Any

_MARKS = {"superscript": "sup", "subscript": "sub"}
_OFF = ("0", "false")
_ESCAPED = re.compile("_x([0-9A-Fa-f]{4})_")


class Workbook:
    """Reads sheets with what all of them refer to: texts, formats and people.

    Args:
        part: the one that names the sheets.
    """

    def __init__(self, archive: Archive, part: str, tracker: Tracker) -> None:
        self._archive, self._tracker = archive, tracker
        self._book, self._related = archive.tree(part), relations(archive, part)
        settings = self._book.find("{*}workbookPr")
        self._since_1904 = settings is not None and settings.get("date1904", "0") not in _OFF
        self._texts, self._people = list[str](), dict[str, str]()
        # The code of a style's numbers, and whether it strikes through what they are.
        self._styles = list[tuple[str, bool]]()
        for _, kind, target in self._related:
            if kind == "sharedStrings":
                self._texts += map(_rich, archive.elements(target, "si"))
            elif kind == "styles":
                self._styles += _styles(archive.tree(target))
            elif kind == "person":
                people = archive.tree(target).iter("{*}person")
                self._people |= {each.get("id"): each.get("displayName", "") for each in people}

    def text(self) -> str:
        """The name and the lines of each sheet.

        Raises:
            DocumentError: they unpack to too much.
            ContextError: they are longer than could fit.
        """
        parts, by_id = list[str](), {each.id: each for each in self._related}
        for sheet in self._book.iter("{*}sheet"):
            id = next(value for key, value in sheet.items() if key.endswith("}id"))
            _, kind, target = by_id[id]
            self._tracker.not_read["chart"] += kind == "chartsheet"
            if kind == "worksheet":
                parts.append(self._sheet(target, Grid(self._tracker, sheet.get("name", ""))))
        return "\n\n".join(parts)

    def _sheet(self, part: str, grid: Grid) -> str:
        self._read_cells(part, grid)
        known = self._archive.names
        beside = [each for each in relations(self._archive, part) if each.target in known]
        threads = [each.target for each in beside if each.kind == "threadedComment"]
        for _, kind, target in beside:
            if kind == "comments":
                self._read_notes(target, grid, in_threads=bool(threads))
            elif kind == "drawing":
                grid.drawn += self._drawn(target)
        for target in threads:
            for each in self._archive.tree(target).iter("{*}threadedComment"):
                by = self._people.get(each.get("personId"), "")
                grid.add_note(*_place(each.get("ref")), by, _in_line(each.findtext("{*}text", "")))
        return grid.text()

    def _read_cells(self, part: str, grid: Grid) -> None:
        row = 0
        for element in self._archive.elements(part, "row", "mergeCell"):
            if element.tag.endswith("}mergeCell"):
                first, last = map(_place, element.get("ref").split(":"))
                grid.merge(*first, *last)
                continue
            row, column, texts = int(element.get("r", row + 1)), 0, dict[int, str]()
            for cell in element:
                place = cell.get("r")
                column = _column(place.rstrip("0123456789")) if place else column + 1
                if text := self._shown(cell, grid):
                    texts[column] = text
            if texts:
                grid.add(row, texts)

    def _shown(self, cell: Element, grid: Grid) -> str:
        """What a cell shows, which stands beside its formula if it has one."""
        inside = {each.tag.rpartition("}")[2]: each for each in cell}
        kind, style = cell.get("t", "n"), cell.get("s")
        code, is_struck = self._styles[int(style)] if style and self._styles else ("", False)
        value = inside["v"].text if "v" in inside else None
        if "is" in inside:
            text = _rich(inside["is"])
        elif value:
            text = self._value(kind, value, code)
        elif "f" not in inside or (kind == "str" and "v" in inside):
            return ""
        else:
            return grid.uncalculated(_in_line(inside["f"].text or ""), cell.get("r", ""))
        return f"~~{text}~~" if is_struck and text else text

    def _value(self, kind: str, value: str, code: str) -> str:
        match kind:
            case "s":
                return self._texts[int(value)]
            case "b":
                return "FALSE" if value in _OFF else "TRUE"
            case "n":
                return formatted(float(value), code, since_1904=self._since_1904)
            case "d":
                return re.sub(r"T00:00(:00)?(\.0+)?Z?$", "", value).replace("T", " ")
            case _:
                return _in_line(value)

    def _read_notes(self, part: str, grid: Grid, *, in_threads: bool) -> None:
        tree = self._archive.tree(part)
        authors = [each.text or "" for each in tree.iter("{*}author")]
        for each in tree.iter("{*}comment"):
            by, text = authors[int(each.get("authorId"))], _rich(each.find("{*}text"))
            # Older programs are told that there is a thread.
            if not (in_threads and by.startswith("tc=")):
                grid.add_note(*_place(each.get("ref")), by, text.removeprefix(f"{by}:").strip())

    def _drawn(self, part: str) -> Iterator[str]:
        """What the shapes of a drawing say; its charts and pictures are counted."""
        for _, kind, _ in relations(self._archive, part):
            self._tracker.not_read["chart"] += kind.startswith("chart")
            self._tracker.not_read["picture"] += kind == "image"
        for box in self._archive.tree(part).iter("{*}txBody"):
            if next(box.iterancestors("{*}Fallback"), None) is None:
                for paragraph in box.iterchildren("{*}p"):
                    if line := _in_line("".join(paragraph.itertext("{*}t"))):
                        yield line


def _place(cell: str) -> tuple[int, int]:
    """The row and the column of a cell such as C4."""
    letters = cell.rstrip("0123456789")
    return int(cell[len(letters) :]), _column(letters)


@lru_cache(maxsize=2**14)
def _column(letters: str) -> int:
    number = 0
    for letter in letters:
        number = 26 * number + ord(letter) - ord("A") + 1
    return number


def _styles(tree: Element) -> Iterator[tuple[str, bool]]:
    own = {
        each.get("numFmtId"): simplified(each.get("formatCode", ""))
        for each in tree.iterfind("{*}numFmts/{*}numFmt")
    }
    struck = [_is_struck(each) for each in tree.iterfind("{*}fonts/{*}font")]
    for style in tree.iterfind("{*}cellXfs/{*}xf"):
        number, font = style.get("numFmtId", "0"), style.get("fontId")
        code = own.get(number, BUILT_IN.get(int(number), ""))
        yield code, font is not None and struck[int(font)]


def _rich(element: Element) -> str:
    """A text whose runs may be raised, lowered or struck through."""
    if len(element) == 1 and element[0].tag.endswith("}t"):
        return _in_line(element[0].text or "")
    root = etree.Element("span")
    for run in element.iterchildren("{*}t", "{*}r"):
        inner = root
        for name in _form(run.find("{*}rPr")):
            inner = etree.SubElement(inner, name)
        inner.text = "".join(run.itertext("{*}t", with_tail=False))
    return _in_line(text_of(root, Tracker("")))


def _form(font: Element | None) -> list[str]:
    """What text of a font is in HTML, from without to within."""
    align = None if font is None else font.find("{*}vertAlign")
    raised = "span" if align is None else _MARKS.get(align.get("val"), "span")
    return ["del", raised] if font is not None and _is_struck(font) else [raised]


def _is_struck(font: Element) -> bool:
    strike = font.find("{*}strike")
    return strike is not None and strike.get("val", "1") not in _OFF


def _in_line(text: str) -> str:
    """A text in one line. Characters may be written by their numbers."""
    if "_x" in text:
        text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
        text = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(text.split())
