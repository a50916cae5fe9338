"""Opening files: what may be read as a document, of which kind it is, and how large."""

import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import BinaryIO, Literal, NoReturn, TextIO

from kvlite.config.units import readable
from kvlite.documents.archive import names_in
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

Kind = Literal[
    "text", "html", "pdf", "zip", "docx", "opendocument", "slides", "sheets", "epub", "fb2",
    "notebook", "rtf", "mail", "outlook", "other",
]  # fmt: skip

# More than the longest trained context, of ten million tokens, takes.
TEXT_LIMIT = 64 * 2**20
# For formats that hold pictures and fonts besides.
FILE_LIMIT = 200 * 2**20
_PIECE = 2**20
# Enough to tell what a file is.
_HEAD = 1024

_REMEDIES = {
    ".doc .ppt .pages .numbers .key": "save it as .docx, .pptx, .xlsx or .pdf",
    ".mobi .azw .azw3 .djvu": "convert it to .epub or text, for example with Calibre's "
    "ebook-convert",
    ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .heic": "run OCR on it, for example tesseract",
    ".zip .gz .bz2 .xz .zst .7z .rar .tar .tgz": "unpack it and name the file inside",
}
_REFUSED = {suffix: remedy for names, remedy in _REMEDIES.items() for suffix in names.split()}
_KINDS: dict[str, Kind] = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".odt": "opendocument",
    ".ods": "sheets",
    ".odp": "opendocument",
    ".pptx": "slides",
    ".xlsx": "sheets",
    ".xlsm": "sheets",
    ".xlsb": "sheets",
    ".xls": "sheets",
    ".epub": "epub",
    ".fb2": "fb2",
    ".ipynb": "notebook",
    ".rtf": "rtf",
    ".eml": "mail",
    ".msg": "outlook",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
}
# What names a part of an archive has, by its kind; the first that fits.
_PARTS: tuple[tuple[str, Kind], ...] = (
    ("word/document", "docx"),
    ("ppt/presentation.xml", "slides"),
    ("xl/workbook.", "sheets"),
    ("META-INF/container.xml", "epub"),
    ("content.xml", "opendocument"),
)
# What an archive says near its beginning that has the parts of any OpenDocument file.
_ODS = b"application/vnd.oasis.opendocument.spreadsheet"
_UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
_NOT_FILES = (
    (stat.S_ISDIR, "is a folder: name one of the files in it."),
    (stat.S_ISFIFO, "is a pipe, not a file: give it as standard input, which is named -."),
    (stat.S_ISSOCK, "is a socket, not a file: save what comes from it to a file and name that."),
)


def require_readable(path: str) -> None:
    """Check by its first bytes that a file could be read as a document; "-" is standard input.

    Raises:
        DocumentError: in one sentence with the remedy, if it could not.
    """
    if path == "-":
        return
    with _opened(path) as file:
        kind = kind_of(next(_pieces(path, file), b"")[:_HEAD], path)
        _require_small(path, os.fstat(file.fileno()).st_size, kind)


def kind_of(head: bytes, path: str) -> Kind:
    """What a file is; its first bytes count for more than its suffix."""
    suffix = "" if path == "-" else os.path.splitext(path)[1].lower()
    if head.startswith(b"%PDF-"):
        return "pdf"
    if head.startswith(b"PK"):
        return "zip"
    if head.startswith(b"{\\rtf"):
        return "rtf"
    if suffix in _REFUSED:
        return "other"
    if path == "-" and re.match(rb"(?i)\s*<(!doctype )?html\b", head[:200]):
        return "html"
    return _KINDS.get(suffix, "text")


def kind_of_archive(data: bytes, path: str) -> Kind:
    """What an archive is by its parts; by its suffix if it has none of a document."""
    names, by_suffix = names_in(data), kind_of(b"", path)
    if "content.xml" in names and (_ODS in data[:_HEAD] or by_suffix == "sheets"):
        return "sheets"
    found = (kind for part, kind in _PARTS if any(name.startswith(part) for name in names))
    return next(found, by_suffix)


def refuse_format(label: str, path: str) -> NoReturn:
    """Raises DocumentError: kvlite does not read such files."""
    remedy = _REFUSED.get(os.path.splitext(path)[1].lower(), _REFUSED[".zip"])
    raise DocumentError(f"{label} is not in a format kvlite reads: {remedy}.")


def bytes_of(path: str, tracker: Tracker) -> bytes:
    """All bytes of a file, or of standard input for "-".

    Raises:
        DocumentError: it cannot be opened, is empty standard input, or has too many.
        ContextError: it has more than could fit.
    """
    if path == "-":
        # Python leaves None where the stream was closed.
        stdin: TextIO | None = sys.stdin
        if stdin is None:
            raise DocumentError(
                "standard input is closed: pipe a document into it, or name a file."
            )
        data = _all(path, stdin.buffer, 0, tracker)
        if not data:
            raise DocumentError(
                "standard input is empty: pipe a document into it (it is read once)."
            )
        return data
    with _opened(path) as file:
        return _all(path, file, os.fstat(file.fileno()).st_size, tracker)


def _all(path: str, file: BinaryIO, size: int, tracker: Tracker) -> bytes:
    """Everything in a file; one whose stated size is too large is refused after a piece."""
    pieces = list[bytes]()
    head, read, kind = b"", 0, None
    for piece in _pieces(path, file):
        pieces.append(piece)
        read += len(piece)
        head = head if len(head) >= _HEAD else head + piece[:_HEAD]
        if kind is None or read <= _HEAD:
            kind = kind_of(head, path)
        _require_small(tracker.label, max(read, size), kind)
        if kind == "text":
            _require_fitting(tracker, head, max(read, size))
    return b"".join(pieces)


def _pieces(path: str, file: BinaryIO) -> Iterator[bytes]:
    read = getattr(file, "read1", file.read)  # read1 does not wait for a full piece
    try:
        while piece := read(_PIECE):
            yield piece
    except OSError as error:
        _refuse_unread(path, error)


def _require_small(label: str, size: int, kind: Kind) -> None:
    limit = TEXT_LIMIT if kind in ("text", "html") else FILE_LIMIT
    if size > limit:
        what = {"text": "of text", "html": "of HTML"}.get(kind, "in one file")
        most = f"{readable(limit)} {what}"
        held = f"has {readable(size)}, and kvlite reads at most {most}"
        if label == "standard input":  # its size is not known
            held = f"has more than {most}, the most that kvlite reads"
        raise DocumentError(
            f"{label} {held}: split it, or save the part that you need as a file of its own."
        )


def _require_fitting(tracker: Tracker, head: bytes, size: int) -> None:
    """Refuse text that is too long in any encoding: a character takes at most four bytes, and a
    line's two-character end in UTF-32 eight."""
    if tracker.limit is None:
        return
    widest = 8 if head.startswith(_UTF32) else 4
    if size > widest * tracker.limit + widest:
        tracker.refuse(f"has {size // widest:,} characters or more")


def _opened(path: str) -> BinaryIO:
    """A regular file, open for reading; nothing else is opened, and opening never blocks."""
    try:
        _require_regular(path, os.stat(path).st_mode)  # opening some devices has effects
        flags = ("O_BINARY", "O_CLOEXEC", "O_NOCTTY", "O_NONBLOCK")
        wanted = sum(getattr(os, flag, 0) for flag in flags)
        file = os.fdopen(os.open(path, os.O_RDONLY | wanted), "rb")
    except (OSError, ValueError) as error:
        _refuse_unread(path, error)
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def _require_regular(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    why = next((why for is_it, why in _NOT_FILES if is_it(mode)), None)
    raise DocumentError(f"{path} {why or 'is a device, not a file: name a file.'}")


def _refuse_unread(path: str, error: OSError | ValueError) -> NoReturn:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        where = "" if os.path.isabs(path) else f" from {os.getcwd()}"
        raise DocumentError(f"There is no file {path!r}: check the path{where}.") from None
    if isinstance(error, PermissionError):
        raise DocumentError(
            f"{path} may not be read by you: change its permissions (`chmod +r`) or copy it."
        ) from None
    reason = getattr(error, "strerror", None) or error
    raise DocumentError(f"{path!r} cannot be read ({reason}): check path and disk.") from error
