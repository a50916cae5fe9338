"""Files people have (text, Markdown, HTML, PDF, Word) as text that remembers its pages.

Whatever is wrong with a file ends as one `DocumentError` that names the file and the remedy. The
parsers are imported where they are used: together they cost half a second, and most runs of
kvlite need none of them.
"""

import io
import itertools
import logging
import lzma
import os
import re
import sys
import threading
import warnings
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO, cast

from kvlite.errors import DocumentError, Stopped

if TYPE_CHECKING:
    from bs4.element import PageElement
    from docx.table import Table, _Cell
    from docx.text.paragraph import Paragraph
    from pypdf.generic import DictionaryObject

_Told = Callable[[int, int], None]

_REMEDIES = {
    ".doc .rtf .odt .ods .odp .xls .xlsx .ppt .pptx .pages": "save it as .docx, .pdf or text",
    ".epub .mobi .azw .azw3 .djvu": "convert it to text, for example with Calibre's ebook-convert",
    ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .heic": "run OCR on it, for example tesseract",
    ".zip .gz .bz2 .xz .zst .7z .rar .tar .tgz": "unpack it and name the file inside",
}
_REFUSED = {suffix: remedy for names, remedy in _REMEDIES.items() for suffix in names.split()}
_BOMS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\x00\x00", "utf-32-le"),  # before UTF-16, whose mark it begins with
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
# Left to all its codecs, charset_normalizer reads a short Latin-1 text as UTF-16 or as DOS Urdu.
_ENCODINGS = (
    "cp1250 cp1251 cp1252 cp1253 cp1254 cp1255 cp1256 iso8859_2 koi8_r mac_roman cp932 euc_jp "
    "gb18030 big5 cp949"
)
# What damaged bytes make the parsers raise besides their own errors; found by fuzzing them.
_PARSER_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError, lzma.LZMAError, zipfile.BadZipFile, zlib.error),
)
_HIDDEN = frozenset(("script", "style", "template", "noscript"))
_PARAGRAPHS = "title p h1 h2 h3 h4 h5 h6 ul ol dl table pre blockquote hr"
_LINES = (
    "address article aside caption center dd details dialog div dt fieldset figcaption figure "
    "footer form header legend li main nav option section summary tr"
)
# Marks in text made from HTML, for the patterns below it: a line ends (once), after a bullet,
# before a row, before a cell, a space to keep.
_END, _BULLET, _ROW, _CELL, _SPACE = "\1\2\3\4\5"
_BREAKS = dict.fromkeys(_PARAGRAPHS.split(), "\n\n") | dict.fromkeys(_LINES.split(), _END)
_BREAKS["br"] = "\n"
_TIDY = (
    (r" {2,}", " "),
    (r"[ \1]*\x01[ \1]*", "\n"),
    (r" ?\n ?", "\n"),
    (r"\n{3,}", "\n\n"),
    (r"(?<!\s)\s*\n(?=(?:- |\d+\. )\x02|\x03)", "\n"),  # no blank line before an item or a row
    (r"\x02\s*(?!- \x02|\d+\. \x02)", ""),
    (r"\x03\s*\x04\s*", "\3"),
    (r"(?<!\s)\s*\x04\s*", " | "),
    (r"[\2\3]", ""),
    (r" *\n *", "\n"),
    (r"\n{3,}", "\n\n"),
    (r"\x05", " "),
)


@dataclass(frozen=True)
class Document:
    """The text of one file.

    `name` is the file's name without its folder, or "stdin". `page_starts` holds the character
    offset at which each page of `text` begins; it is empty for formats that have no pages.
    Lines end in a single newline.
    """

    name: str
    text: str
    page_starts: tuple[int, ...]

    def page_of(self, offset: int) -> int | None:
        """Return the page, counted from 1, that a character offset lies on; None without pages.

        The end of the text counts as the last page. Raises ValueError if `offset` is outside it.
        """
        if not 0 <= offset <= len(self.text):
            raise ValueError(f"offset {offset} is outside the text's 0..{len(self.text)}")
        return bisect_right(self.page_starts, offset) or None


def read_document(
    path: str,
    *,
    progress: _Told | None = None,
    cancel: threading.Event | None = None,
) -> Document:
    """Read a text, Markdown, HTML, PDF or Word (.docx) file; "-" reads standard input.

    The file's first bytes count for more than its suffix, and are all there is for standard input.

    Args:
        progress: told how many pages, or paragraphs and tables, are done, and of how many.
        cancel: set to end it after the next of these.

    Raises:
        DocumentError: in one sentence with the remedy, for whatever cannot be read as text.
        Stopped: `cancel` was set.
    """

    def told(done: int, total: int) -> None:
        if cancel is not None and cancel.is_set():
            raise Stopped
        if progress is not None:
            progress(done, total)

    label, name = ("standard input", "stdin") if path == "-" else (path, os.path.basename(path))
    suffix = "" if path == "-" else os.path.splitext(name)[1].lower()
    data = _standard_input() if path == "-" else _read_bytes(path)
    pages: list[str] = []
    if not data.strip():
        text = ""
    elif data.startswith(b"%PDF-") or (suffix == ".pdf" and not _is_word(data)):
        pages = _pdf_pages(data, label, told)
        text = "\n".join(pages)
    elif _is_word(data) or suffix == ".docx":
        text = _word_text(data, label, told)
    elif suffix in _REFUSED or data.startswith(b"{\\rtf"):
        remedy = _REFUSED.get(suffix, _REFUSED[".rtf"])
        raise DocumentError(f"{label} is not in a format kvlite reads: {remedy}.")
    elif suffix in (".html", ".htm", ".xhtml") or (
        path == "-" and re.match(rb"(?i)\s*<(!doctype )?html\b", data[:200])
    ):
        text = _html_text(_decode(data, label, html=True), label)
    else:
        text = _decode(data, label)
    if not text.strip():
        raise DocumentError(f"{label} holds no text: name a file that has some.")
    ends = tuple(itertools.accumulate((len(page) + 1 for page in pages), initial=0))
    return Document(name, text if pages else _newlines(text), ends[:-1])


def whole_characters(text: str) -> str:
    """Text with a replacement character for halves of surrogate pairs, which no tokenizer takes.

    They come from broken font tables, and from names and arguments that are not UTF-8.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _standard_input() -> bytes:
    # Python leaves None where the stream was closed.
    stream: TextIO | None = sys.stdin
    if stream is None:
        raise DocumentError("standard input is closed: pipe a document into it, or name a file.")
    data = stream.buffer.read()
    if not data:
        raise DocumentError("standard input is empty: pipe a document into it (it is read once).")
    return data


def _read_bytes(path: str) -> bytes:
    if os.path.isdir(path):
        raise DocumentError(f"{path} is a folder: name one of the files in it.")
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        where = "" if os.path.isabs(path) else f" from {os.getcwd()}"
        raise DocumentError(f"There is no file {path!r}: check the path{where}.") from None
    except PermissionError:
        raise DocumentError(
            f"{path} may not be read by you: change its permissions (`chmod +r`) or copy it."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"{path!r} cannot be read ({reason}): check path and disk.") from error


def _newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decode(data: bytes, label: str, *, html: bool = False) -> str:
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(encoding)
            except UnicodeDecodeError:
                raise DocumentError(
                    f"{label} begins as {encoding.upper()} but does not go on so, as if cut or "
                    "damaged: save it again as UTF-8."
                ) from None
    if b"\0" in data:
        raise DocumentError(
            f"{label} holds binary data, not text: convert it to text, HTML, PDF or .docx first "
            "(if it is text in UTF-16, save it as UTF-8)."
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    if html:
        from bs4.dammit import EncodingDetector

        try:
            return data.decode(EncodingDetector.find_declared_encoding(data, is_html=True) or "")
        except (LookupError, UnicodeDecodeError):
            pass
    from charset_normalizer import from_bytes

    matches = from_bytes(data, cp_isolation=_ENCODINGS.split())
    best = matches.best()
    if best is None:
        raise DocumentError(f"{label} is in no encoding kvlite can recognise: save it as UTF-8.")
    # Among equally clean readings the commonest encoding is the likeliest, not the first by name.
    western = (
        match
        for match in matches
        if "cp1252" in match.could_be_from_charset and match.chaos <= best.chaos
    )
    return str(next(western, best))


def _html_text(markup: str, label: str) -> str:
    import bs4
    from bs4.element import CData, NavigableString, PreformattedString, Tag

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bs4's guesses that this is XML, or a file's name
            soup = bs4.BeautifulSoup(re.sub("[\1-\5]", "", markup), "html.parser")
    except (bs4.exceptions.ParserRejectedMarkup, *_PARSER_ERRORS) as error:
        raise DocumentError(
            f"{label} cannot be read as HTML: open it in a browser and save it as text."
        ) from error
    parts: list[str] = []
    # Not recursion: pages nest deeper than Python may. With each node goes its list's numbering.
    stack: list[tuple[PageElement | str, Iterator[int] | None]] = [(soup, None)]
    while stack:
        node, numbers = stack.pop()
        if isinstance(node, Tag):
            if node.name in _HIDDEN or node.has_attr("hidden"):
                continue
            parts.append(_BREAKS.get(node.name, ""))
            if node.name == "br":
                continue
            stack.append((parts[-1], None))
            if node.name == "pre":
                for line_break in node.find_all("br"):
                    line_break.replace_with("\n")
                parts.append(node.get_text().replace(" ", _SPACE))
                continue
            if node.name in ("ol", "ul"):
                numbers = itertools.count(1) if node.name == "ol" else None
            elif node.name == "li":
                parts.append((f"{next(numbers)}. " if numbers else "- ") + _BULLET)
            elif node.name in ("tr", "td", "th"):
                parts.append(_ROW if node.name == "tr" else _CELL)
            stack.extend((child, numbers) for child in reversed(node.contents))
        elif not isinstance(node, NavigableString):
            parts.append(str(node))
        elif not isinstance(node, PreformattedString) or isinstance(node, CData):
            parts.append(re.sub(r"[ \t\r\n\f]+", " ", node))
    text = "".join(parts)
    for pattern, replacement in _TIDY:
        text = re.sub(pattern, replacement, text)
    return text.strip("\n")


def _is_word(data: bytes) -> bool:
    if not data.startswith(b"PK"):
        return False
    try:
        return "word/document.xml" in zipfile.ZipFile(io.BytesIO(data)).namelist()
    except _PARSER_ERRORS:
        return False


def _word_text(data: bytes, label: str, told: _Told) -> str:
    import docx
    from docx.exceptions import PythonDocxError
    from docx.opc.exceptions import OpcError
    from docx.oxml.ns import qn
    from lxml.etree import LxmlError

    if data.startswith(b"\xd0\xcf\x11\xe0"):
        raise DocumentError(
            f"{label} is an old Word file or locked by a password: save it in Word as .docx "
            "without a password."
        )
    try:
        document = docx.Document(io.BytesIO(data))
        # python-docx passes over what stands in form fields and in tracked insertions.
        for wrapper in document.element.body.xpath(
            ".//w:sdt | .//w:ins | .//w:moveTo | .//w:smartTag | .//w:customXml | .//w:fldSimple"
        ):
            content = wrapper.find(qn("w:sdtContent"))
            for child in list(wrapper if content is None else content):
                wrapper.addprevious(child)
            wrapper.getparent().remove(wrapper)
        lines, total = list[str](), len(document.element.body)
        for done, block in enumerate(document.iter_inner_content(), 1):
            for line in _block_lines(block):
                told(done, total)
                lines.append(line)
        return "\n".join(lines)
    except (PythonDocxError, OpcError, LxmlError, *_PARSER_ERRORS) as error:
        raise DocumentError(
            f"{label} is damaged or no Word document: get it anew, or open it in Word or "
            "LibreOffice and save it again as .docx."
        ) from error


def _block_lines(block: "Paragraph | Table") -> Iterator[str]:
    from docx.table import Table

    if not isinstance(block, Table):
        yield block.text
        return
    for row in block.rows:
        # A merged cell comes once for every column it spans: the key makes it one.
        cells = {cell._tc: " ".join(" ".join(_cell_lines(cell)).split()) for cell in row.cells}
        yield " | ".join(cells.values())


def _cell_lines(cell: "_Cell") -> Iterator[str]:
    for block in cell.iter_inner_content():
        yield from _block_lines(block)


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


def _pdf_pages(data: bytes, label: str, told: _Told) -> list[str]:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PdfReadError, PyPdfError

    pages = list[str]()
    try:
        with _silent_pypdf:
            reader = PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise DocumentError(
                    f"{label} is locked by a password: save it without one, for example "
                    "`qpdf --decrypt --password=... in.pdf out.pdf`."
                )
            total = len(reader.pages)
            for page in reader.pages:
                pages.append(page.extract_text())
                told(len(pages), total)
            declared = cast("DictionaryObject", reader.root_object["/Pages"]).get("/Count")
        # Cut short inside a later revision, or missing a page, it would be read without a word.
        unfinished = re.search(rb"\b\d+\s+\d+\s+obj\b", data[data.rfind(b"startxref") :])
        if unfinished or not pages or (isinstance(declared, int) and len(pages) < declared):
            raise PdfReadError("cut short")
    except DependencyError as error:
        raise DocumentError(f"{label} is encrypted: `pip install cryptography` first.") from error
    except (PyPdfError, *_PARSER_ERRORS) as error:
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
    return [_newlines(whole_characters(page)).replace("\0", "").strip("\n") for page in pages]
