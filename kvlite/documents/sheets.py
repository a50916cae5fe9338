"""Workbooks: Excel's (.xlsx, .xlsm, .xlsb, .xls) and OpenDocument's (.ods).

The binary kinds (.xlsb, .xls) are read by calamine, which tells values alone: no errors, formulas
without a value, merged cells, notes, shapes or raised text.
"""

import io
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from kvlite.documents.archive import Archive
from kvlite.documents.number_format import formatted
from kvlite.documents.ods import ods_text
from kvlite.documents.office import OLE, document_part
from kvlite.documents.tracker import Tracker
from kvlite.documents.workbook import Workbook
from kvlite.errors import DocumentError

_SHOWN: dict[type, Callable[[Any], str]] = {
    bool: lambda value: str(value).upper(),
    float: formatted,
    datetime: lambda value: value.isoformat(" ", "minutes"),
    timedelta: lambda value: formatted(value / timedelta(days=1), "[h]"),
}


def sheets_text(data: bytes, tracker: Tracker) -> str:
    """The values of a workbook: each sheet's name, and a line for each row that holds any.

    Raises:
        DocumentError: it has a password, is damaged, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    if not data.startswith(OLE):
        archive = Archive(data, tracker)
        part = document_part(archive, "xl/workbook.xml")
        if part in archive.names and not part.endswith(".bin"):
            return Workbook(archive, part, tracker).text()
        if "content.xml" in archive.names:
            return ods_text(archive, tracker)
        archive.require_small()
    from python_calamine import CalamineError, CalamineWorkbook, PasswordError, SheetTypeEnum

    try:
        book = CalamineWorkbook.from_filelike(io.BytesIO(data))
        parts, listed = list[str](), book.sheets_metadata
        for number, sheet in enumerate(listed):
            tracker.report(number, len(listed))
            if sheet.typ != SheetTypeEnum.WorkSheet:
                tracker.not_read["chart"] += sheet.typ == SheetTypeEnum.ChartSheet
                continue
            rows = [sheet.name]
            for cells in book.get_sheet_by_index(number).iter_rows():
                row = " | ".join(map(_shown, cells)).rstrip(" |")
                tracker.add_characters(len(row) + 1)
                rows += [row] if row else []
            parts.append("\n".join(rows))
    except PasswordError as error:
        raise DocumentError(
            f"{tracker.label} is locked by a password: save it in its program without one."
        ) from error
    except CalamineError as error:
        raise ValueError(str(error)) from error
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    """A cell's value in one line."""
    return " ".join(_SHOWN.get(type(value), str)(value).split())
