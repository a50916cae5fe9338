"""What a PDF has beside the text of its pages: form fields and notes; pictures are counted."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from kvlite.documents.tracker import Tracker

_HIDDEN_FLAG, _PASSWORD_FLAG = 1 << 1, 1 << 13


def fields_and_notes(page: Any, tracker: Tracker) -> Iterator[str]:
    """Filled-in form fields and notes of a page, a line each."""
    import pypdfium2.raw as pdfium

    # These open something, or are read elsewhere.
    others = pdfium.FPDF_ANNOT_LINK, pdfium.FPDF_ANNOT_POPUP, pdfium.FPDF_ANNOT_FILEATTACHMENT
    for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
        annotation = pdfium.FPDFPage_GetAnnot(page, index)
        if annotation and not pdfium.FPDFAnnot_GetFlags(annotation) & _HIDDEN_FLAG:
            kind = pdfium.FPDFAnnot_GetSubtype(annotation)
            tracker.not_read["embedded file"] += kind == pdfium.FPDF_ANNOT_FILEATTACHMENT
            if kind == pdfium.FPDF_ANNOT_WIDGET:
                yield _field(page.formenv, annotation)
            elif kind not in others:
                yield _note(annotation)
        pdfium.FPDFPage_CloseAnnot(annotation)


def count_attached(pdf: Any, tracker: Tracker) -> None:
    """Count embedded files, and XFA forms, which only some programs can show."""
    import pypdfium2.raw as pdfium

    tracker.not_read["embedded file"] += pdf.count_attachments()
    xfa = pdfium.FORMTYPE_XFA_FULL, pdfium.FORMTYPE_XFA_FOREGROUND
    tracker.not_read["XFA form"] += pdf.get_formtype() in xfa


def count_pictures(page: Any, tracker: Tracker, seen: set[int]) -> None:
    """Count the pictures of a page that none before has."""
    import pypdfium2.raw as pdfium

    for picture in page.get_objects([pdfium.FPDF_PAGEOBJ_IMAGE]):
        known = hash(bytes(picture.get_data()))
        tracker.not_read["picture"] += known not in seen
        seen.add(known)


def _note(annotation: Any) -> str:
    text, author = _value(annotation, b"Contents"), _value(annotation, b"T")
    by = f" by {author}" if author else ""
    return f"[Note{by}: {text}]" if text else ""


def _field(form: Any, widget: Any) -> str:
    """A field's name and value."""
    import pypdfium2.raw as pdfium

    flags = pdfium.FPDFAnnot_GetFormFieldFlags(form, widget) if form else 0
    kind = pdfium.FPDFAnnot_GetFormFieldType(form, widget) if form else -1
    buttons = pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON
    if kind in buttons and not pdfium.FPDFAnnot_IsChecked(form, widget):
        return ""
    if kind == pdfium.FPDF_FORMFIELD_TEXTFIELD and flags & _PASSWORD_FLAG:
        return ""
    if kind == -1:
        name = _value(widget, b"TU") or _value(widget, b"T")
        value = _value(widget, b"V")
    else:
        name = _line(pdfium.FPDFAnnot_GetFormFieldAlternateName, form, widget) or _line(
            pdfium.FPDFAnnot_GetFormFieldName, form, widget
        )
        value = ", ".join(
            _line(pdfium.FPDFAnnot_GetOptionLabel, form, widget, at)
            for at in range(max(0, pdfium.FPDFAnnot_GetOptionCount(form, widget)))
            if pdfium.FPDFAnnot_IsOptionSelected(form, widget, at)
        ) or _line(pdfium.FPDFAnnot_GetFormFieldValue, form, widget)
    if value in ("", "Off"):
        return ""
    return f"[{name}: {value}]" if name else f"[{value}]"


def _value(annotation: Any, key: bytes) -> str:
    import pypdfium2.raw as pdfium

    return _line(pdfium.FPDFAnnot_GetStringValue, annotation, key)


def _line(function: Callable[..., int], *asked: Any) -> str:
    """What a function of PDFium writes into a buffer, in one line."""
    size = function(*asked, None, 0)
    buffer = (ctypes.c_ushort * (size // 2))()
    function(*asked, buffer, size)
    return " ".join(bytes(buffer).decode("utf-16-le", "replace").replace("\0", "").split())
