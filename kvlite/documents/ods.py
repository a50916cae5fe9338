"""OpenDocument spreadsheets (.ods): what is shown of each cell that is stored."""

from typing import Any

from kvlite.documents.archive import Archive
from kvlite.documents.grid import Grid
from kvlite.documents.markup import text_of
from kvlite.documents.number_format import formatted
from kvlite.documents.opendocument import Elements, require_unlocked
from kvlite.documents.tracker import Tracker

Element = Any

_VALUES = ("string-value", "date-value", "time-value", "boolean-value", "value")
_MOST_COLUMNS = 2**14


def ods_text(archive: Archive, tracker: Tracker) -> str:
    """Each sheet's name, and a line for each row that shows anything.

    Raises:
        DocumentError: it has a password, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    require_unlocked(archive)
    sheets, grid, row = list[str](), Grid(tracker), 1
    elements = Elements(archive, set())
    if "styles.xml" in archive.names:
        elements.read("styles.xml")
    for element in archive.elements("content.xml", "style", "table-row", "shapes", "table"):
        match _own(element.tag):
            case "style":
                elements.learn(element)
            case "table-row":
                grid.name = _about(next(element.iterancestors("{*}table"))).get("name", "")
                row = _read_row(element, row, grid, elements, archive)
            case "shapes":
                _read_shapes(element, grid, tracker)
            case _:
                grid.name = _about(element).get("name", "")
                sheets.append(grid.text())
                grid, row = Grid(tracker), 1
    return "\n\n".join(sheets)


def _read_row(element: Element, row: int, grid: Grid, elements: Elements, archive: Archive) -> int:
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
        text = " ".join(_shown(each, elements) for each in cell.iterchildren("{*}p")).strip()
        text = text or _stored(about)
        if not text and "formula" in about and "value-type" not in about:
            formula = about["formula"].partition("=")[2]
            text = grid.uncalculated(formula, f"R{row}C{column}")
        if text and _own(cell.tag) == "table-cell":
            struck = elements.effect("table-cell", about.get("style-name", "")) == "del"
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


def _shown(paragraph: Element, elements: Elements) -> str:
    """What a paragraph of a cell says, in one line."""
    elements.convert(paragraph)
    return " ".join(text_of(paragraph, Tracker("")).split())


def _stored(about: dict[str, str]) -> str:
    """A value as it is stored by programs that leave it to others how it is shown."""
    value = next((about[each] for each in _VALUES if each in about), "")
    match about.get("value-type"):
        case "percentage" if value:
            return formatted(float(value), "%")
        case "boolean":
            return value.upper()
        case "currency":
            return f"{value} {about.get('currency', '')}".strip()
    return value


def _about(element: Element) -> dict[str, str]:
    """An element's attributes without their namespaces."""
    return {_own(key): value for key, value in element.items()}


def _own(name: str) -> str:
    return name.rpartition("}")[2]
