"""The text of a PDF, page by page."""

import io
import logging
import re
import threading
from typing import TYPE_CHECKING, cast

from kvlite.documents.document import one_kind_of_newline, whole_characters
from kvlite.documents.following import Following
from kvlite.documents.parser_errors import PARSER_ERRORS
from kvlite.documents.pdf_beside import Pictures, beside, count_attached
from kvlite.errors import DocumentError

if TYPE_CHECKING:
    from pypdf.generic import DictionaryObject


class _SilentPypdf:
    """Around reading PDFs, of which several threads may do so at once: what pypdf mends is nobody
    else's matter."""

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


def pdf_pages(data: bytes, following: Following) -> list[str]:
    """The text of each page, in the order in which it is drawn; fields and notes follow it.

    Raises:
        DocumentError: it is damaged, locked, unpacks to too much, or has no text.
        ContextError: it is longer than could fit.
        Stopped: someone cancelled.
    """
    from pypdf.errors import DependencyError, LimitReachedError, PyPdfError

    label = following.label
    try:
        with _silent_pypdf:
            pages = _pages(data, following)
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
            f"{label} has {count} without any text, as a scan has: run OCR on it first, for "
            "example `ocrmypdf in.pdf out.pdf`."
        )
    return pages


def _pages(data: bytes, following: Following) -> list[str]:
    from pypdf import PdfReader
    from pypdf.errors import PdfReadError

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise DocumentError(
            f"{following.label} is locked by a password: save it without one, for example "
            "`qpdf --decrypt --password=... in.pdf out.pdf`."
        )
    pages, pictures, total = list[str](), Pictures(following), len(reader.pages)
    for page in reader.pages:
        pictures.begin(page)
        text = page.extract_text(visitor_operand_before=pictures.drawn)
        following.check()
        pictures.end(text)
        lines = [text.strip("\r\n"), *beside(page, following)]
        pages.append(_plain("\n".join(filter(None, lines))))
        following.came_out(len(pages[-1]) + 1)
        following.done(len(pages), total)
    declared = cast("DictionaryObject", reader.root_object["/Pages"]).get("/Count")
    # Cut short inside a later revision, or missing a page, it would be read without a word.
    unfinished = re.search(rb"\b\d+\s+\d+\s+obj\b", data[data.rfind(b"startxref") :])
    if unfinished or not pages or (isinstance(declared, int) and len(pages) < declared):
        raise PdfReadError("cut short")
    count_attached(reader, following)
    return pages


def _plain(text: str) -> str:
    return one_kind_of_newline(whole_characters(text)).replace("\0", "").strip("\n")
