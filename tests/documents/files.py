"""Files of every kind, sound and damaged, and what reading them ends with."""

import io
import sys
import zipfile
from collections.abc import Callable, Sequence

import docx
import pytest
from pypdf import PdfReader, PdfWriter

from kvlite.documents import Document, read_document
from kvlite.errors import DocumentError

Save = Callable[[str, str | bytes], str]


def refusal(path: str) -> str:
    """The message that reading `path` ends with, checked to be one sentence naming the file."""
    with pytest.raises(DocumentError) as caught:
        read_document(path)
    assert path in str(caught.value)
    message = str(caught.value).replace(path, "FILE")  # pytest's folders have telling names
    assert message.endswith(".")
    assert "\n" not in message
    return message


def pdf(pages: Sequence[str | None], *, count: int | None = None) -> bytes:
    """A PDF with one line of text a page, or an image where the text is None."""
    kids = b" ".join(b"%d 0 R" % (5 + 2 * i) for i in range(len(pages)))
    count = len(pages) if count is None else count
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (count, kids),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        b"<< /Type /XObject /Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray "
        b"/BitsPerComponent 8 /Length 1 >>\nstream\n\x7f\nendstream",
    ]
    for i, text in enumerate(pages):
        drawn = b"612 0 0 792 0 0 cm /I1 Do"
        if text is not None:
            drawn = b"BT /F1 12 Tf 72 700 Td (%s) Tj ET" % text.encode("cp1252")
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R /Resources "
            b"<< /Font << /F1 3 0 R >> /XObject << /I1 4 0 R >> >> >>" % (6 + 2 * i),
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn),
        ]
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\n" % (len(objects) + 1)
    return out + trailer + b"startxref\n%d\n%%%%EOF\n" % out.rindex(b"xref\n0")


def encrypted(content: bytes, user: str, algorithm: str) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(content)))
    writer.encrypt(user, "owner", algorithm=algorithm)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def word(fill: Callable[..., object]) -> bytes:
    document = docx.Document()
    fill(document)
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
_DRAWING = "http://schemas.openxmlformats.org/drawingml/2006"
_SPACES = (
    f'xmlns:w="{_WORD}" xmlns:m="{_OFFICE}/math" xmlns:r="{_OFFICE}/relationships" '
    f'xmlns:a="{_DRAWING}/main" xmlns:pic="{_DRAWING}/picture" xmlns:c="{_DRAWING}/chart" '
    f'xmlns:wp="{_DRAWING}/wordprocessingDrawing" xmlns:dgm="{_DRAWING}/diagram" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:v="urn:schemas-microsoft-com:vml" xmlns:o="urn:schemas-microsoft-com:office:office"'
)


def run(text: str) -> str:
    return f"<w:r><w:t>{text}</w:t></w:r>"


def raw_word(body: str, *, begins: str = "", **parts: str) -> bytes:
    """A docx whose body, and whose other parts by their kind, are given as markup."""
    roots = {"header": "hdr", "footer": "ftr"}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        related = "".join(
            f'<Relationship Id="{name}" Type="{_OFFICE}/relationships/{name.rstrip("0123456789")}"'
            f' Target="{name}.xml"/>'
            for name in parts
        )
        package = "http://schemas.openxmlformats.org/package/2006/relationships"
        archive.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{package}"><Relationship Id="r" Target="word/document.xml" '
            f'Type="{_OFFICE}/relationships/officeDocument"/></Relationships>',
        )
        archive.writestr(
            "word/_rels/document.xml.rels",
            f'<Relationships xmlns="{package}">{related}</Relationships>',
        )
        archive.writestr(
            "word/document.xml",
            f"{begins}<w:document {_SPACES}><w:body>{body}</w:body></w:document>",
        )
        for name, markup in parts.items():
            root = roots.get(name.rstrip("0123456789"), name)
            archive.writestr(f"word/{name}.xml", f"<w:{root} {_SPACES}>{markup}</w:{root}>")
    return out.getvalue()


def rezipped(content: bytes, part: str, change: Callable[[bytes], bytes]) -> bytes:
    """The docx with one part's bytes changed and the archive itself still sound."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name == part else old.read(name))
    return out.getvalue()


class Stdin:
    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def read_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> Document:
    monkeypatch.setattr(sys, "stdin", Stdin(content))
    return read_document("-")


def read_or_refuse(path: str) -> bool:
    try:
        document = read_document(path)
    except DocumentError as error:
        assert path in str(error)
        return False
    assert document.text.encode()
    return True
