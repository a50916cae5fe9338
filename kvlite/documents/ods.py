"""OpenDocument spreadsheets (.ods): what is shown of each cell that is stored."""

from typing import Any

from kvlite.documents.archive import Archive
from kvlite.documents.grid import Grid
from kvlite.documents.markup import text_of
from kvlite.documents.opendocument import require_unlocked
from kvlite.documents.tracker import Tracker

Element = Any

# Stored by programs that leave it to others how values are shown.
_VALUES = ("string-value", "date-value", "time-value", "boolean-value", "value")
_HTML_NAMES = {"line-break": "br", "tab": "br", "s": "br", "annotation": "template"}
_MOST_COLUMNS = 2**14


def ods_text(archive: Archive, tracker: Tracker) -> str:
    """Each sheet's name, and a line for each row that shows anything.

    Raises:
        DocumentError: it has a password, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    require_unlocked(archive)
    sheets, grid, row, effects = list[str](), Grid(tracker), 1, dict[str, str]()
    for element in archive.elements("content.xml", "style", "table-row", "shapes", "table"):
        match _own(element.tag):
            case "style":
                effects[_about(element).get("name", "")] = _effect(element)
            case "table-row":
                grid.name = _about(next(element.iterancestors("{*}table"))).get("name", "")
                row = _read_row(element, row, grid, effects, archive)
            case "shapes":
                _read_shapes(element, grid, tracker)
            case _:
                grid.name = _about(element).get("name", "")
                sheets.append(grid.text())
                grid, row = Grid(tracker), 1
    return "\n\n".join(sheets)


def _read_row(
    element: Element, row: int, grid: Grid, effects: dict[str, str], archive: Archive
) -> int:
    """Read a row, which may stand for several; which is the next?"""
    cells, column = dict[int, str](), 1
    for cell in element.iterchildren("{*}table-cell", "{*}covered-table-cell"):
        about = _about(cell)
        end = column + int(about.get("number-columns-repeated", "1"))
        _read_shapes(cell, grid, archive.tracker)
        for note in cell.iterchildren("{*}annotation"):
            said = " ".join("".join(each.itertext()) for each in note.iterchildren("{*}p"))
            author = note.findtext("{*}creator", "")
            grid.add_note(row, column, author, " ".join(said.split()))
        text = " ".join(_shown(each, effects) for each in cell.iterchildren("{*}p")).strip()
        text = text or next((about[each] for each in _VALUES if each in about), "")
        if not text and "formula" in about and "value-type" not in about:
            formula = about["formula"].partition("=")[2]
            text = grid.uncalculated(formula, f"R{row}C{column}")
        if text and _own(cell.tag) == "table-cell":
            struck = effects.get(about.get("style-name", "")) == "del"
            shown = f"~~{text}~~" if struck else text
            cells.update(dict.fromkeys(range(column, min(end, _MOST_COLUMNS + 1)), shown))
            down, across = (
                int(about.get(f"number-{which}-spanned", "1")) for which in ("rows", "columns")
            )
            if (down, across) != (1, 1):
                grid.merge(row, column, row + down - 1, column + across - 1)
        column = end
    after = row + int(_about(element).get("number-rows-repeated", "1"))
    archive.count((after - row) * sum(len(each) + 1 for each in cells.values()))
    for each in range(row, after) if cells else ():
        grid.add(each, cells)
    return after


def _read_shapes(element: Element, grid: Grid, tracker: Tracker) -> None:
    for shape in element.iter("{*}frame", "{*}custom-shape"):
        kinds = {_own(each.tag) for each in shape}
        is_object = not kinds.isdisjoint(("object", "object-ole"))
        tracker.not_read["embedded object"] += is_object
        tracker.not_read["picture"] += "image" in kinds and not is_object
        said = (" ".join("".join(each.itertext()).split()) for each in shape.iter("{*}p"))
        grid.drawn += filter(None, said)


def _shown(paragraph: Element, effects: dict[str, str]) -> str:
    """What a paragraph of a cell says, in one line."""
    for each in paragraph.iter():
        effect = effects.get(_about(each).get("style-name", ""))
        each.tag = _HTML_NAMES.get(_own(each.tag), effect or "span")
    return " ".join(text_of(paragraph, Tracker("")).split())


def _effect(style: Element) -> str:
    """What text of a style is in HTML, if it is raised, lowered or struck through."""
    about = {key: value for each in style for key, value in _about(each).items()}
    raised = about.get("text-position", "0%").partition(" ")[0]
    if raised != "0%":
        return "sub" if raised.startswith(("sub", "-")) else "sup"
    return "del" if about.get("text-line-through-style", "none") != "none" else ""


def _about(element: Element) -> dict[str, str]:
    """An element's attributes without their namespaces."""
    return {_own(key): value for key, value in element.items()}


def _own(name: str) -> str:
    return name.rpartition("}")[2]
