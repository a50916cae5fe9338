"""Reading any file as a document, in this process or in one of its own."""

import itertools
import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvlite.config.child_process import run_in_child
from kvlite.documents.document import Document, one_kind_of_newline
from kvlite.documents.opening import Kind, bytes_of, kind_of, kind_of_archive, refuse_format
from kvlite.documents.tracker import PARSER_ERRORS, ProgressCallback, Tracker
from kvlite.errors import DocumentError

# Bytes beyond what Python takes, ten times the largest file.
_MEMORY = 2 * 2**30
# OCR takes about 1 GiB a page, and reserves more.
_MEMORY_OCR = 4 * 2**30

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
    "sheets": (_reader("sheets", "sheets_text"), "Excel workbook"),
    "epub": (_reader("epub", "epub_text"), "EPUB book"),
    "fb2": (_reader("direct", "fb2_text"), "FictionBook"),
    "notebook": (_reader("direct", "notebook_text"), "Jupyter notebook"),
    "rtf": (_reader("rtf", "rtf_text"), "RTF text"),
    "mail": (_reader("mail", "mail_text"), "message"),
}


def read_document(
    path: str,
    *,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    ocr: bool = False,
    apart: bool = False,
) -> Document:
    """Read a text, PDF, HTML, Word, OpenDocument, PowerPoint, Excel, EPUB, FictionBook, RTF or
    mail file, or a Jupyter notebook; "-" reads standard input.

    The file's first bytes count for more than its suffix.

    Args:
        limit: the most characters that could fit the model. A longer text is refused by its size
            before it is read, anything else as soon as that much text came out of it.
        progress: called with how much of the file is done, and of how much: pages, or bytes.
        cancel: set to stop reading.
        ocr: whether pages of a PDF that are pictures are read, too, which takes seconds each, and
            always happens apart.
        apart: read a file in a process of its own, which can be stopped at any time and whose
            memory is limited: for files from others, and callers that cannot wait.

    Raises:
        DocumentError: in one sentence with the remedy, for whatever cannot be read as text.
        ContextError: it is longer than `limit`.
        Stopped: `cancel` was set.
    """
    about: dict[str, Any] = {"limit": limit, "progress": progress, "cancel": cancel}
    try:
        if path == "-" or not (apart or ocr):
            return _read_here(path, ocr=ocr, **about)
        memory = _MEMORY_OCR if ocr else _MEMORY
        return run_in_child(_read_here, path, ocr=ocr, memory=memory, **about)
    except MemoryError as error:
        raise DocumentError(
            f"{_label(path)} takes more memory to open than there is: split it, or save it as text."
        ) from error


def _read_here(
    path: str,
    *,
    limit: int | None,
    ocr: bool,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Document:
    label, name = _label(path), "stdin" if path == "-" else os.path.basename(path)
    tracker = Tracker(label, limit, progress, cancel, ocr)
    pages, text = _read(path, tracker)
    if not text.strip():
        raise DocumentError(f"{label} holds no text: name a file that has some.")
    ends = tuple(itertools.accumulate((len(page) + 1 for page in pages), initial=0))
    text = text if pages else one_kind_of_newline(text)
    if limit is not None and len(text) > limit:
        tracker.refuse(f"has {len(text):,} characters")
    return Document(name, text, ends[:-1], tracker.skipped)


def _label(path: str) -> str:
    return "standard input" if path == "-" else path


def _read(path: str, tracker: Tracker) -> tuple[list[str], str]:
    """A file's pages, if it has any, and its text."""
    data = bytes_of(path, tracker)
    if not data.strip():
        return [], ""
    kind = kind_of(data[:1024], path)
    if kind == "zip":
        kind = kind_of_archive(data, path)
    if kind in ("other", "zip"):
        refuse_format(tracker.label, path)
    read, what = _READERS[kind]
    try:
        found = read(data, tracker)
    except PARSER_ERRORS as error:
        raise DocumentError(
            f"{tracker.label} is damaged or no {what}: get it anew, or open it in the program that "
            "it is from and save it again."
        ) from error
    return ([], found) if isinstance(found, str) else (found, "\n".join(found))
