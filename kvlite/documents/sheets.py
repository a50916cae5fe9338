"""Excel workbooks (.xlsx, .xlsm, .xlsb, .xls)."""

import io
from collections import Counter
from datetime import datetime
from typing import Any

from kvlite.config.child_process import ChildEnded, run_in_child
from kvlite.documents.archive import Archive
from kvlite.documents.office import OLE
from kvlite.documents.tracker import ProgressCallback, Tracker
from kvlite.errors import DocumentError

# Bytes beyond what Python takes: some 40 million cells.
_MEMORY = 2 * 2**30


def sheets_text(data: bytes, tracker: Tracker) -> str:
    """The values of a workbook: each sheet's name, and a line for each row that holds any.

    They are read in a process of their own, since the parser ends its process over some damaged
    files, and takes memory for every cell between the first and the last.

    Raises:
        DocumentError: it has a password, is damaged, or unpacks to too much.
        ContextError: it is longer than could fit.
        Stopped: someone cancelled.
    """
    if not data.startswith(OLE):
        Archive(data, tracker).require_small()
    try:
        text, not_read = run_in_child(
            _read,
            data,
            tracker.label,
            tracker.limit,
            progress=tracker.report,
            cancel=tracker.cancel,
            memory=_MEMORY,
        )
    except ChildEnded as error:
        raise ValueError(str(error)) from error
    tracker.not_read += not_read
    return text


def _read(
    data: bytes, label: str, limit: int | None, *, progress: ProgressCallback
) -> tuple[str, Counter[str]]:
    """A workbook's text, and what of it was not read."""
    from python_calamine import CalamineError, CalamineWorkbook, PasswordError, SheetTypeEnum

    tracker = Tracker(label, limit, progress)
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
            f"{label} is locked by a password: save it in Excel without one."
        ) from error
    except CalamineError as error:
        raise ValueError(str(error)) from error
    return "\n\n".join(parts), tracker.not_read


def _shown(value: Any) -> str:
    """A cell's value in one line, a whole number without its point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, datetime):
        value = value.isoformat(" ", "minutes")
    return " ".join(str(value).split())
