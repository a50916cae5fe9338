"""A PDF, page by page: text, form fields and notes."""

import logging
import re
from typing import Any

from kvlite.documents.document import one_kind_of_newline, whole_characters
from kvlite.documents.pdf_beside import count_attached, count_pictures, fields_and_notes
from kvlite.documents.pdf_text import page_text
from kvlite.documents.scans import Scans
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

_PAGE, _COUNT = re.compile(rb"/Type\s*/Page\b"), re.compile(rb"(/Count\s+)(\d+)")


def pdf_pages(data: bytes, tracker: Tracker) -> list[str]:
    """The lines of each page, followed by its form fields and notes.

    Raises:
        DocumentError: it is damaged, locked, or has no text.
        ContextError: it is longer than could fit.
    """
    import pypdfium2

    label = tracker.label
    try:
        pages = _pages(data, tracker)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise DocumentError(
                f"{label} is locked by a password: save it without one, for example "
                "`qpdf --decrypt --password=... in.pdf out.pdf`."
            ) from error
        raise DocumentError(
            f"{label} is damaged, cut short, or no PDF: get it anew, or repair it, for example "
            "with `qpdf in.pdf out.pdf`."
        ) from error
    if not any(page.strip() for page in pages):
        count = "1 page" if len(pages) == 1 else f"{len(pages)} pages"
        raise DocumentError(
            f"{label} has {count} without any text"
            + (
                ", also for OCR: check that it is not empty, or turned."
                if tracker.ocr
                else ", as a scan has: read it with the setting ocr (--ocr), or run OCR on it "
                "first, for example `ocrmypdf in.pdf out.pdf`."
            )
        )
    return pages


def _pages(data: bytes, tracker: Tracker) -> list[str]:
    import pypdfium2

    # PDFium silently reads what is there of a file that is cut short, be it in a later revision.
    end = data.rfind(b"startxref")
    if end < 0 or re.search(rb"\b\d+\s+\d+\s+obj\b", data[end:]):
        raise pypdfium2.PdfiumError("cut short")
    logging.getLogger("pypdfium2").setLevel(logging.CRITICAL)  # it warns of XFA forms, counted here
    pdf = pypdfium2.PdfDocument(data)
    if len(_PAGE.findall(data)) > len(pdf):
        # It may say that it has fewer pages than it has; without a count they are counted.
        counted = pypdfium2.PdfDocument(
            _COUNT.sub(lambda found: found[1] + b"0" * len(found[2]), data)
        )
        pdf = counted if len(counted) > len(pdf) else pdf
    pdf.init_forms()
    total, scans, seen = len(pdf), Scans(), set[int]()
    if not total:
        raise pypdfium2.PdfiumError("no pages")
    pages = list[str]()
    for index in range(total):
        page = pdf[index]
        text = page_text(page)
        if text:
            count_pictures(page, tracker, seen)
        else:
            text = scans.text(page) if tracker.ocr else ""
            drawn = not text and next(page.get_objects(), None) is not None
            tracker.scanned += [index + 1] if drawn else []
        pages.append(_plain("\n".join(filter(None, [text, *fields_and_notes(page, tracker)]))))
        page.close()
        tracker.add_characters(len(pages[-1]) + 1)
        tracker.report(len(pages), total)
    count_attached(pdf, tracker)
    tracker.page_labels = _labels(pdf)
    pdf.close()
    return pages


def _labels(pdf: Any) -> tuple[str, ...]:
    """What pages are called; nothing if that is only their numbers."""
    numbers = [str(number) for number in range(1, len(pdf) + 1)]
    labels = [pdf.get_page_label(at) or number for at, number in enumerate(numbers)]
    return tuple(map(_plain, labels)) if labels != numbers else ()


def _plain(text: str) -> str:
    return one_kind_of_newline(whole_characters(text)).replace("\0", "").strip("\n")
