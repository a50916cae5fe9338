"""The text of a PDF, page by page: what is drawn, form fields and notes; pictures are counted."""

import io
import logging
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from kvlite.documents.document import one_kind_of_newline, whole_characters
from kvlite.documents.scans import Scans
from kvlite.documents.tracker import PARSER_ERRORS, Tracker
from kvlite.errors import DocumentError

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader
    from pypdf.generic import DictionaryObject

_HIDDEN_FLAG, _PASSWORD_FLAG = 1 << 1, 1 << 13
# Annotations that open something, or are read elsewhere.
_NO_NOTES = frozenset(("/Link", "/Popup", "/Widget", "/FileAttachment"))
# The deepest nesting of form fields that is followed.
_DEEP = 20


class _SilentPypdf:
    """Silences pypdf's warnings about what it repairs while any thread reads a PDF."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading = self._level = 0

    def __enter__(self) -> None:
        logger = logging.getLogger("pypdf")
        with self._lock:
            if not self._reading:
                self._level = logger.level
                logger.setLevel(logging.CRITICAL + 1)
            self._reading += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._reading -= 1
            if not self._reading:
                logging.getLogger("pypdf").setLevel(self._level)


_silent_pypdf = _SilentPypdf()


def pdf_pages(data: bytes, tracker: Tracker) -> list[str]:
    """The text of each page, in drawing order, followed by its form fields and notes.

    Raises:
        DocumentError: it is damaged, locked, unpacks to too much, or has no text.
        ContextError: it is longer than could fit.
    """
    from pypdf.errors import DependencyError, LimitReachedError, PyPdfError

    label = tracker.label
    try:
        with _silent_pypdf:
            pages = _pages(data, tracker)
    except DependencyError as error:
        raise DocumentError(f"{label} is encrypted: `pip install cryptography` first.") from error
    except LimitReachedError as error:
        raise DocumentError(
            f"{label} unpacks to more than any document needs: get it anew from a source that you "
            "trust, or save it as text."
        ) from error
    except (PyPdfError, *PARSER_ERRORS) as error:
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
    from pypdf import PdfReader
    from pypdf.errors import PdfReadError

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise DocumentError(
            f"{tracker.label} is locked by a password: save it without one, for example "
            "`qpdf --decrypt --password=... in.pdf out.pdf`."
        )
    pages, pictures, total = list[str](), _Pictures(tracker), len(reader.pages)
    scans = Scans(data)
    for index, page in enumerate(reader.pages):
        pictures.begin(page)
        text = page.extract_text(visitor_operand_before=pictures.drawn)
        if text.strip():
            pictures.count()
        else:
            text = scans.text(index) if tracker.ocr else ""
            tracker.scanned += [index + 1] if pictures.drawn_here and not text else []
        lines = [text.strip("\r\n"), *_fields_and_notes(page, tracker)]
        pages.append(_plain("\n".join(filter(None, lines))))
        tracker.add_characters(len(pages[-1]) + 1)
        tracker.report(len(pages), total)
    scans.close()
    declared = cast("DictionaryObject", reader.root_object["/Pages"]).get("/Count")
    # pypdf silently reads a file that is cut short inside a later revision, or lacks a page.
    unfinished = re.search(rb"\b\d+\s+\d+\s+obj\b", data[data.rfind(b"startxref") :])
    if unfinished or not pages or (isinstance(declared, int) and len(pages) < declared):
        raise PdfReadError("cut short")
    _count_attached(reader, tracker)
    return pages


def _plain(text: str) -> str:
    return one_kind_of_newline(whole_characters(text)).replace("\0", "").strip("\n")


class _Pictures:
    """Counts a document's pictures by the operations that draw them; each counts once.

    Attributes:
        drawn_here: how many the page draws.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._seen = set[Any]()
        self._named = dict[str, Any]()
        self._of_page = 0
        self.drawn_here = 0

    def begin(self, page: "PageObject") -> None:
        self._named, self._of_page, self.drawn_here = {}, 0, 0
        resources = _resolved(page.get("/Resources"))
        held = _resolved(resources.get("/XObject")) if isinstance(resources, dict) else None
        if isinstance(held, dict):
            self._named = {str(name): dict.__getitem__(held, name) for name in held}

    def drawn(self, operator: bytes, operands: Any, *_: object) -> None:
        """Look at one operation of the page."""
        if operator == b"INLINE IMAGE":
            self.drawn_here += 1
            self._of_page += 1
        elif operator == b"Do" and operands and (name := str(operands[0])) in self._named:
            found = _resolved(self._named[name])
            if isinstance(found, dict) and found.get("/Subtype") == "/Image":
                self.drawn_here += 1
                key = getattr(self._named[name], "idnum", None) or id(found)
                self._of_page += key not in self._seen
                self._seen.add(key)

    def count(self) -> None:
        """Count the page's pictures, beside text, as not read."""
        self.tracker.not_read["picture"] += self._of_page


def _fields_and_notes(page: "PageObject", tracker: Tracker) -> Iterator[str]:
    """Filled-in form fields and notes of a page, a line each."""
    every = _resolved(page.get("/Annots"))
    for raw in every if isinstance(every, list) else ():
        each = _resolved(raw)
        if not isinstance(each, dict) or _number(each.get("/F")) & _HIDDEN_FLAG:
            continue
        kind = each.get("/Subtype")
        if kind == "/FileAttachment":
            tracker.not_read["embedded file"] += 1
        said = _field(each) if kind == "/Widget" else _note(each) if kind not in _NO_NOTES else ""
        if said:
            yield said


def _count_attached(reader: "PdfReader", tracker: Tracker) -> None:
    """Count embedded files, and XFA forms, which only some programs can show."""
    names = _resolved(reader.root_object.get("/Names"))
    if isinstance(names, dict) and "/EmbeddedFiles" in names:
        tracker.not_read["embedded file"] += len(reader.attachments)
    form = _resolved(reader.root_object.get("/AcroForm"))
    if isinstance(form, dict) and "/XFA" in form:
        tracker.not_read["XFA form"] += 1


def _resolved(value: Any) -> Any:
    return None if value is None else value.get_object()


def _number(value: Any) -> int:
    found = _resolved(value)
    return int(found) if isinstance(found, int) else 0


def _words(value: Any) -> str:
    """A text value in one line, a name without its slash; "" for anything else."""
    found = _resolved(value)
    if isinstance(found, list):
        return ", ".join(filter(None, map(_words, found)))
    if not isinstance(found, str):
        return ""
    return " ".join(found.removeprefix("/").split())


def _note(annotation: Any) -> str:
    text, author = _words(annotation.get("/Contents")), _words(annotation.get("/T"))
    by = f" by {author}" if author else ""
    return f"[Note{by}: {text}]" if text else ""


def _field(widget: Any) -> str:
    """A field's name and value; either may be inherited from its parents."""
    names, value, flags = list[str](), "", 0
    at: Any = widget
    for _ in range(_DEEP):
        names += [own] if (own := _words(at.get("/T"))) else []
        value = value or _words(at.get("/V"))
        flags = flags or _number(at.get("/Ff"))
        at = _resolved(at.get("/Parent"))
        if not isinstance(at, dict):
            break
    if not value or value == "Off" or flags & _PASSWORD_FLAG:
        return ""
    name = _words(widget.get("/TU")) or ".".join(reversed(names))
    return f"[{name}: {value}]" if name else f"[{value}]"
