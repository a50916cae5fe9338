"""PDFs read page by page, or refused."""

import io
import logging
import random
import zlib
from threading import Event

import pytest
from PIL import Image, ImageDraw, ImageFont
from pypdf import PdfReader, PdfWriter
from pypdf.generic import (
    ArrayObject,
    DictionaryObject,
    NameObject,
    NumberObject,
    TextStringObject,
)

from kvlite.config.settings import Settings
from kvlite.documents import Document, read_document
from kvlite.documents.reading_order import Box, lines_of
from kvlite.errors import SettingError, Stopped
from kvlite.methods.engine_config import require_meanings

from .files import (
    Save,
    encrypted,
    mutations,
    pdf,
    read_or_refuse,
    refusal,
)


def test_pdf_pages_are_remembered(save: Save) -> None:
    document = read_document(save("a.pdf", pdf(["First page", "Zweite Größe", "Third"])))
    assert document.name == "a.pdf"
    assert document.text == "First page\nZweite Größe\nThird"
    assert document.page_starts == (0, 11, 24)
    offsets = (0, 10, 11, 23, 24, len(document.text))
    assert [document.page_of(offset) for offset in offsets] == [1, 1, 2, 2, 3, 3]


def test_pdf_with_some_textless_pages_is_read(save: Save) -> None:
    document = read_document(save("a.pdf", pdf([None, "two", None, "four", None])))
    assert document.text == "\ntwo\n\nfour\n"
    assert document.page_starts == (0, 1, 5, 6, 11)
    assert [document.page_of(document.text.index(word)) for word in ("two", "four")] == [2, 4]


@pytest.mark.parametrize("offset", [-1, 4])
def test_page_of_an_offset_outside_the_text(offset: int) -> None:
    with pytest.raises(ValueError, match=r"outside the text's 0\.\.3"):
        Document("a.pdf", "abc", (0,)).page_of(offset)


def test_pdf_is_known_by_its_first_bytes(save: Save) -> None:
    assert read_document(save("a.txt", pdf(["x y"]))).page_starts == (0,)
    assert read_document(save("a.doc", pdf(["x y"]))).text == "x y"


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
def test_pdf_locked_by_a_password(save: Save, algorithm: str) -> None:
    content = pdf(["secret words"])
    document = read_document(save("open.pdf", encrypted(content, "", algorithm)))
    assert document.text == "secret words"
    assert "password" in refusal(save("shut.pdf", encrypted(content, "user", algorithm)))


@pytest.mark.usefixtures("in_this_process")
def test_pdf_encryption_without_the_package_for_it(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pypdf.errors import DependencyError

    def missing(*_: object) -> None:
        raise DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr("pypdf.PdfReader", missing)
    assert "pip install cryptography" in refusal(save("a.pdf", pdf(["x"])))


def test_scanned_pdf_is_sent_to_ocr(save: Save) -> None:
    message = refusal(save("scan.pdf", pdf([None, None, None])))
    assert "3 pages without any text" in message
    assert "ocrmypdf" in message
    assert "has 1 page without any text" in refusal(save("scan.pdf", pdf([None])))


def test_cut_pdf_is_never_read_in_part(save: Save) -> None:
    content = pdf(["one", "two", "three"])
    end = content.rindex(b"%%EOF")
    for length in range(5, end, len(content) // 50):
        assert "qpdf" in refusal(save("a.pdf", content[:length]))


def test_pdf_cut_in_its_second_revision_is_not_read_as_its_first(save: Save) -> None:
    content = pdf(["old"])
    revised = content + pdf(["new"])[9:]
    assert read_document(save("a.pdf", content + b"\r\ntrailing mail footer")).text == "old"
    assert "cut short" in refusal(save("a.pdf", revised[: len(content) + 200]))


def test_pdf_that_lacks_a_page_it_declares_is_refused(save: Save) -> None:
    assert "damaged" in refusal(save("a.pdf", pdf(["one"], count=2)))
    assert read_document(save("a.pdf", pdf(["one", "two"], count=1))).text == "one\ntwo"


@pytest.mark.parametrize("content", [b"%PDF-1.7\n", b"<html>Not found</html>", pdf([])])
def test_what_is_no_pdf_is_refused(save: Save, content: bytes) -> None:
    assert "no PDF" in refusal(save("a.pdf", content))


@pytest.mark.usefixtures("in_this_process")
def test_lone_surrogates_and_nulls_do_not_reach_the_text(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pypdf.PageObject.extract_text", lambda _, **__: "\na\ud83d\r\nb\0 \ud83d\ude00\n"
    )
    assert read_document(save("a.pdf", pdf(["x"]))).text == "a\ufffd\nb 😀"


def test_pypdf_is_silenced_and_its_logger_left_alone(
    save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("pypdf")
    content = pdf(["one"])
    broken = content.replace(b"startxref\n", b"startxref\n9")
    with caplog.at_level(logging.DEBUG):
        PdfReader(io.BytesIO(broken))
        assert caplog.records, "the file must be one that pypdf warns of"
        caplog.clear()
        logger.setLevel(logging.INFO)
        try:
            assert read_document(save("a.pdf", broken)).text == "one"
            refusal(save("b.pdf", content[:100]))
            assert not caplog.records
            assert logger.level == logging.INFO
        finally:
            logger.setLevel(logging.NOTSET)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["plain", "compressed", "RC4-128", "AES-256"])
def test_mutated_pdf_is_read_or_refused(save: Save, kind: str) -> None:
    content = pdf(["one", "two", None])
    if kind == "compressed":
        writer = PdfWriter(clone_from=PdfReader(io.BytesIO(content)))
        for page in writer.pages:
            page.compress_content_streams()
        out = io.BytesIO()
        writer.write(out)
        content = out.getvalue()
    elif kind != "plain":
        content = encrypted(content, "", kind)
    read = [read_or_refuse(save("a.pdf", mutant)) for mutant in mutations(content, 100)]
    assert 2 < sum(read) < 90


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"/Root 1 0 R", b"/Root 3 0 R"),
        (b"/Root 1 0 R", b"/Root (xx)"),
        (b"/Pages 2 0 R", b"/Pages (aa)"),
        (b"/Kids [", b"/Kidz ["),
        (b"/Contents 6 0 R", b"/Contents 7 0 Q"),
        (b"/Parent 2 0 R", b"/Parent 5 0 R"),
        (b"/F1 12 Tf", b"/F1 /2 Tf"),
        (b"/Resources", b"/Filter /Nonsense /Resources"),
        (b"/Length", b"/Filter /FlateDecode /Length"),
        (b"/Length", b"/Filter /Nonsense /Length"),
        (b"/Type /Page ", b"/Type 3 /Page "),
        (b"/Encoding /WinAnsiEncoding", b"/FirstChar /1 /Widths [0 0] /LastChar 5"),
        (b"/Size", b"/Encrypt << /Filter /Standard /V 0 >> /Size"),
        (b"/Size", b"/Encrypt 2 0 R /Size"),
        (b"/Size", b"/Prev -40 /Size"),
        (b"/Size", b"/Prev %d /Size" % 10**30),
        (b"BT ", b"3 BI "),
        (b"/Size", b"/Prev (x) /Size"),
    ],
)
def test_pdf_with_confused_objects_is_read_or_refused(save: Save, old: bytes, new: bytes) -> None:
    content = pdf(["one", "two"])
    assert old in content
    read_or_refuse(save("a.pdf", content.replace(old, new)))


def laid_out(*lines: tuple[int, int, str]) -> bytes:
    drawn = " ".join(f"BT /F1 10 Tf {x} {y} Td ({text}) Tj ET" for x, y, text in lines)
    return pdf(["x"]).replace(b"BT /F1 12 Tf 72 700 Td (x) Tj ET", drawn.encode())


def test_pdf_columns_and_tables_are_read_as_they_are_drawn(save: Save) -> None:
    """By their places alone, columns of text would be mixed line by line."""
    columns = laid_out(
        (72, 700, "One"), (72, 686, "two."), (320, 700, "Three"), (320, 686, "four.")
    )
    assert read_document(save("a.pdf", columns)).text == "One\ntwo.\nThree\nfour."
    table = laid_out((72, 700, "Pear"), (220, 700, "3.20"), (72, 686, "Fig"), (220, 686, "4.10"))
    assert read_document(save("a.pdf", table)).text == "Pear 3.20\nFig 4.10"


# What stands beside the text of pages


def with_annotations(*annotations: dict[str, object]) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(["one", "two"]))))
    every = ArrayObject()
    for each in annotations:
        entries = {NameObject(name): value for name, value in each.items()}
        every.append(writer._add_object(DictionaryObject(entries)))
    writer.pages[0][NameObject("/Annots")] = every
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def with_everything() -> bytes:
    """A document of all that is read beside its text."""
    text, name = TextStringObject, NameObject
    return with_annotations(
        {"/Subtype": name("/Widget"), "/T": text("Name"), "/V": text("Ann")},
        {"/Subtype": name("/Text"), "/Contents": text("Why?"), "/T": text("Cy")},
    )


def test_pdf_fields_and_notes_follow_their_page(save: Save) -> None:
    text, name, number = TextStringObject, NameObject, NumberObject
    parent = DictionaryObject({name("/T"): text("tax"), name("/V"): text("12 EUR")})
    content = with_annotations(
        {"/Subtype": name("/Widget"), "/T": text("Name"), "/V": text("Ann\nBo")},
        {"/Subtype": name("/Widget"), "/T": text("rate"), "/Parent": parent},
        {"/Subtype": name("/Widget"), "/TU": text("Agreed"), "/V": name("/Yes")},
        {"/Subtype": name("/Widget"), "/T": text("no"), "/V": name("/Off")},
        {"/Subtype": name("/Widget"), "/T": text("no"), "/V": text("x"), "/Ff": number(1 << 13)},
        {"/Subtype": name("/Text"), "/Contents": text("Why?"), "/T": text("Cy")},
        {"/Subtype": name("/FreeText"), "/Contents": text("Typed over")},
        {"/Subtype": name("/Text"), "/Contents": text("hidden"), "/F": number(2)},
        {"/Subtype": name("/Link"), "/Contents": text("no")},
        {"/Subtype": name("/FileAttachment")},
    )
    document = read_document(save("a.pdf", content))
    assert document.text == (
        "one\n[Name: Ann Bo]\n[tax.rate: 12 EUR]\n[Agreed: Yes]\n[Note by Cy: Why?]\n"
        "[Note: Typed over]\ntwo"
    )
    assert document.page_starts == (0, document.text.index("two"))
    assert document.not_read == ("1 embedded file",)


def test_pdf_pictures_scans_and_attachments_are_counted(save: Save) -> None:
    drawn = b" /I1 Do BI /W 1 /H 1 /BPC 8 /CS /G ID x EI"
    content = pdf(["one", "two", None]).replace(b"(one) Tj ET", b"(one) Tj ET" + drawn)
    content = content.replace(b"(two) Tj ET", b"(two) Tj ET /I1 Do")
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(content)))
    writer.add_attachment("a.csv", b"1,2")
    writer.add_attachment("b.csv", b"1,2")
    out = io.BytesIO()
    writer.write(out)
    document = read_document(save("a.pdf", out.getvalue()))
    scanned = "scanned page 3 (the setting ocr reads it)"
    assert document.not_read == ("2 pictures", "2 embedded files", scanned)
    assert document.note == f"a.pdf: 2 pictures, 2 embedded files and {scanned} were not read"
    many = [None, "two", None, None, "five", None]
    document = read_document(save("b.pdf", pdf(many)))
    assert (
        document.note == "b.pdf: scanned pages 1, 3-4, 6 (the setting ocr reads them) were not read"
    )


@pytest.mark.long
def test_scanned_pages_are_read_by_ocr(save: Save) -> None:
    pytest.importorskip("rapidocr")
    picture = Image.new("L", (900, 260), 255)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(40)
    draw.text((40, 40), "The heron waits by the river.", font=font, fill=0)
    draw.text((40, 140), "Due: 14.03.2024, 908.92", font=font, fill=0)
    out = io.BytesIO()
    picture.save(out, "PDF", resolution=100)
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(out.getvalue())))
    writer.append(io.BytesIO(pdf(["typed", None])))
    out = io.BytesIO()
    writer.write(out)
    path, seen = save("a.pdf", out.getvalue()), list[tuple[int, int]]()
    document = read_document(path, ocr=True, progress=lambda *now: seen.append(now))
    lines = "The heron waits by the river.\nDue: 14.03.2024, 908.92"
    assert document.text == f"{lines}\ntyped\n" and len(document.page_starts) == 3
    assert document.note == "a.pdf: scanned page 3 was not read"
    assert seen and seen[-1] <= (3, 3)
    assert read_document(path).text == "\ntyped\n"
    stop = Event()
    stop.set()
    with pytest.raises(Stopped):
        read_document(path, ocr=True, cancel=stop)


def test_ocr_that_is_not_installed_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvlite.documents.scans.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"^--ocr needs rapidocr.*kvlite\[ocr\]"):
        require_meanings(Settings(ocr=True))
    require_meanings(Settings())


def test_lines_are_put_in_the_order_of_reading() -> None:
    def box(text: str, left: float, top: float, right: float) -> Box:
        return Box(text, left, top, right, top + 20)

    rows = range(5)
    left = [box(f"left {row}", 100 + row % 2, 100 + 30 * row, 480) for row in rows]
    right = [box(f"right {row}", 520, 104 + 30 * row, 900 - row) for row in rows]
    heading, foot = box("heading", 100, 40, 900), box("foot", 110, 300, 880)
    page = [*left, *right, heading, foot]
    expected = [each.text for each in (heading, *left, *right, foot)]
    for seed in range(5):
        assert lines_of(random.Random(seed).sample(page, len(page))) == expected
    table = [
        box(text, left, 40 * row, left + 12 * len(text))
        for row, cells in enumerate(["1 Bearing 154,00", "2 Ring 30,00", "3 Service 507,00"])
        for left, text in zip((100, 250, 900), cells.split(), strict=True)
    ]
    assert lines_of(table[::-1]) == ["1 Bearing 154,00", "2 Ring 30,00", "3 Service 507,00"]
    assert lines_of([]) == []


def test_pdf_that_unpacks_to_too_much_is_refused(save: Save) -> None:
    packed = zlib.compress(b"0 0 m " * 14_000_000)
    content = pdf(["x" * len(packed)])
    line = content[content.rindex(b"stream\nBT") : content.index(b"endstream", -700)]
    stream = b"stream\n" + packed
    content = content.replace(line, stream.ljust(len(line) - 1) + b"\n")
    length = content.rindex(b"<< /Length")
    content = content[:length] + content[length:].replace(
        b"<< /Length", b"<< /Filter /FlateDecode /Length", 1
    )
    assert "unpacks to more than any document needs" in refusal(save("a.pdf", content))


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"/Kids [5 0 R", b"/Kids [2 0 R"),
        (b"/Kids [5 0 R", b"/Kids [" + b"[" * 50_000),
        (b"/Type /Page ", b"/Annots [5 0 R 5 0 R 3 0 R 99 0 R 7 null (x)] /Type /Page "),
        (b"/Type /Page ", b"/Annots 5 0 R /Type /Page "),
        (b"/Type /Page ", b"/Annots [<< /Subtype /Widget /Parent 5 0 R /V 5 0 R >>] /Type /Page "),
        (b"/Pages 2 0 R", b"/Names (x) /AcroForm [1] /Pages 2 0 R"),
        (b"/Pages 2 0 R", b"/Names << /EmbeddedFiles 1 0 R >> /Pages 2 0 R"),
    ],
)
def test_pdf_whose_objects_go_in_circles_is_read_or_refused(
    save: Save, old: bytes, new: bytes
) -> None:
    content = pdf(["one"])
    assert old in content
    read_or_refuse(save("a.pdf", content.replace(old, new)))
