"""Excel workbooks (.xlsx, .xlsm, .xlsb, .xls)."""

import io
from datetime import datetime
from typing import Any

from kvlite.documents.archive import Archive
from kvlite.documents.office import OLE
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError


def sheets_text(data: bytes, tracker: Tracker) -> str:
    """The values of a workbook: each sheet's name, and a line for each row that holds any.

    Raises:
        DocumentError: it has a password, is damaged, or unpacks to too much.
        ContextError: it is longer than could fit.
    """
    if not data.startswith(OLE):
        Archive(data, tracker).require_small()
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
            f"{tracker.label} is locked by a password: save it in Excel without one."
        ) from error
    except CalamineError as error:
        raise ValueError(str(error)) from error
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    """A cell's value in one line, a whole number without its point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, datetime):
        value = value.isoformat(" ", "minutes")
    return " ".join(str(value).split())
