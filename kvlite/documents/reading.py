"""Reading any file as a document, in a process of its own."""

import itertools
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module

from kvlite.config.child_process import ChildEnded, run_in_child
from kvlite.documents.document import Document, one_kind_of_newline
from kvlite.documents.opening import Kind, bytes_of, kind_of, kind_of_archive, refuse_format
from kvlite.documents.tracker import PARSER_ERRORS, ProgressCallback, Tracker
from kvlite.errors import DocumentError

# Bytes beyond what Python takes. OCR takes about 1 GiB a page, and reserves more.
_MEMORY, _MEMORY_OCR = 3 * 2**30, 4 * 2**30

# Calls within calls; parsers allow markup 2,048 elements deep.
_DEEPEST = 20_000

Reader = Callable[[bytes, Tracker], str | list[str]]


def _reader(module: str, name: str) -> Reader:
    """A function of a module of this package, which is imported when it is first called."""

    def read(data: bytes, tracker: Tracker) -> str | list[str]:
        reader: Reader = getattr(import_module(f"kvlite.documents.{module}"), name)
        return reader(data, tracker)

    return read


# How each kind is read, a list being pages, and what it is called.
_READERS: dict[Kind, tuple[Reader, str]] = {
    "text": (_reader("plain_text", "decoded"), "text"),
    "html": (_reader("html", "html_page"), "HTML page"),
    "pdf": (_reader("pdf", "pdf_pages"), "PDF"),
    "docx": (_reader("word", "word_text"), "Word document"),
    "opendocument": (_reader("opendocument", "opendocument_text"), "OpenDocument file"),
    "slides": (_reader("slides", "slides"), "PowerPoint file"),
    "sheets": (_reader("sheets", "sheets_text"), "workbook"),
    "epub": (_reader("epub", "epub_text"), "EPUB book"),
    "fb2": (_reader("direct", "fb2_text"), "FictionBook"),
    "notebook": (_reader("direct", "notebook_text"), "Jupyter notebook"),
    "rtf": (_reader("rtf", "rtf_text"), "RTF text"),
    "mail": (_reader("mail", "mail_text"), "message"),
    "outlook": (_reader("outlook", "outlook_text"), "message of Outlook's"),
}


def read_document(
    path: str,
    *,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    ocr: bool = False,
    encoding: str = "",
) -> Document:
    """Read a text, PDF, HTML, Word, OpenDocument, PowerPoint, Excel, EPUB, FictionBook, RTF or
    mail file, or a Jupyter notebook; "-" reads standard input.

    The file's first bytes count for more than its suffix. It is read in a process of its own, which
    can be stopped at any time and whose memory is limited: parsers of damaged files crash.

    Args:
        limit: the most characters that could fit the model. A longer text is refused by its size
            before it is read, anything else as soon as that much text came out of it.
        progress: called with how much of the file is done, and of how much: pages, or bytes.
        cancel: set to stop reading.
        ocr: whether pages of a PDF that are pictures are read, too, which takes seconds each.
        encoding: what text and HTML are in that say nothing of it; left out, UTF-8 or the
            likeliest.

    Raises:
        DocumentError: in one sentence with the remedy, for whatever cannot be read as text.
        ContextError: it is longer than `limit`.
        Stopped: `cancel` was set.
    """
    label = "standard input" if path == "-" else path
    try:
        piped = bytes_of(path, Tracker(label, limit)) if path == "-" else None
        return run_in_child(
            _read, path, piped, label, limit, ocr, encoding,
            progress=progress or _ignored, cancel=cancel, memory=_MEMORY_OCR if ocr else _MEMORY,
        )  # fmt: skip
    except MemoryError as error:
        raise DocumentError(
            f"{label} takes more memory to open than there is: split it, or save it as text."
        ) from error
    except ChildEnded as error:
        raise DocumentError(
            f"{label} is damaged, as it ends the program that reads it: open it in the program "
            "that it is from and save it again."
        ) from error


def _ignored(done: int, total: int) -> None:
    """What is done when nobody asks for progress."""


def _read(
    path: str,
    piped: bytes | None,
    label: str,
    limit: int | None,
    ocr: bool,
    encoding: str,
    *,
    progress: ProgressCallback,
) -> Document:
    """A file as a document; `piped` are the bytes of standard input."""
    sys.setrecursionlimit(_DEEPEST)
    tracker = Tracker(label, limit, progress, ocr, encoding)
    found = _text(path, bytes_of(path, tracker) if piped is None else piped, tracker)
    pages = [] if isinstance(found, str) else found
    text = one_kind_of_newline(found) if isinstance(found, str) else "\n".join(found)
    if not text.strip():
        raise DocumentError(f"{label} holds no text: name a file that has some.")
    if limit is not None and len(text) > limit:
        tracker.refuse(f"has {len(text):,} characters")
    ends = tuple(itertools.accumulate((len(page) + 1 for page in pages), initial=0))
    name = "stdin" if path == "-" else os.path.basename(path)
    assumed = tuple(dict.fromkeys(tracker.assumed))
    return Document(name, text, ends[:-1], tracker.skipped, assumed, tracker.page_labels)


def _text(path: str, data: bytes, tracker: Tracker) -> str | list[str]:
    """The text of a file, or that of each of its pages."""
    if not data.strip():
        return ""
    kind = kind_of(data[:1024], path)
    if kind == "zip":
        kind = kind_of_archive(data, path)
    if kind in ("other", "zip"):
        refuse_format(tracker.label, path)
    reader, what = _READERS[kind]
    try:
        return reader(data, tracker)
    except PARSER_ERRORS as error:
        raise DocumentError(
            f"{tracker.label} is damaged or no {what}: get it anew, or open it in the program that "
            "it is from and save it again."
        ) from error
