"""Reading any file as a document, in this process or in one of its own."""

import itertools
import os
import threading

from kvlite.config.child_process import run_in_child
from kvlite.documents.document import Document, one_kind_of_newline
from kvlite.documents.opening import bytes_of, kind_of, refuse_format
from kvlite.documents.plain_text import decoded
from kvlite.documents.tracker import ProgressCallback, Tracker
from kvlite.errors import DocumentError

# Bytes beyond what Python takes, ten times the largest file.
_MEMORY = 2 * 2**30


def read_document(
    path: str,
    *,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Document:
    """Read a text, Markdown, HTML, PDF or Word (.docx) file; "-" reads standard input.

    The file's first bytes count for more than its suffix.

    Args:
        limit: the most characters that could fit the model. A longer text is refused by its size
            before it is read, anything else as soon as that much text came out of it.
        progress: called with how much of the file is done, and of how much: pages, or bytes.
        cancel: set to stop reading.

    Raises:
        DocumentError: in one sentence with the remedy, for whatever cannot be read as text.
        ContextError: it is longer than `limit`.
        Stopped: `cancel` was set.
    """
    label, name = ("standard input", "stdin") if path == "-" else (path, os.path.basename(path))
    tracker = Tracker(label, limit, progress, cancel)
    try:
        pages, text = _read(path, tracker)
    except MemoryError as error:
        raise _too_large_for_memory(label) from error
    if not text.strip():
        raise DocumentError(f"{label} holds no text: name a file that has some.")
    ends = tuple(itertools.accumulate((len(page) + 1 for page in pages), initial=0))
    text = text if pages else one_kind_of_newline(text)
    if limit is not None and len(text) > limit:
        tracker.refuse(f"has {len(text):,} characters")
    return Document(name, text, ends[:-1], tracker.skipped)


def read_apart(
    path: str,
    *,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Document:
    """Like `read_document`, in a process of its own: it can be stopped at any time, and its memory
    is limited. For files from others, and callers that cannot wait. Standard input is read in this
    process.
    """
    if path == "-":
        return read_document(path, limit=limit, progress=progress, cancel=cancel)
    try:
        return run_in_child(
            read_document, path, limit=limit, progress=progress, cancel=cancel, memory=_MEMORY
        )
    except MemoryError as error:
        raise _too_large_for_memory(path) from error


def _too_large_for_memory(label: str) -> DocumentError:
    return DocumentError(
        f"{label} takes more memory to open than there is: split it, or save it as text."
    )


def _read(path: str, tracker: Tracker) -> tuple[list[str], str]:
    """A file's pages, if it has any, and its text."""
    data = bytes_of(path, tracker)
    if not data.strip():
        return [], ""
    kind = kind_of(data[:1024], path)
    if kind == "zip":
        from kvlite.documents.word import is_word

        kind = "docx" if is_word(data) else kind_of(b"", path)
    if kind == "pdf":
        from kvlite.documents.pdf import pdf_pages

        pages = pdf_pages(data, tracker)
        return pages, "\n".join(pages)
    if kind == "docx":
        from kvlite.documents.word import word_text

        return [], word_text(data, tracker)
    if kind == "other":
        refuse_format(tracker.label, path)
    text = decoded(data, tracker, html=kind == "html")
    if kind == "html":
        from kvlite.documents.html import html_text

        text = html_text(text, tracker)
    return [], text
