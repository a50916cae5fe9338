"""PDFs read page by page, or refused."""

import io
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
    NullObject,
    NumberObject,
    TextStringObject,
)

from kvlite.config.settings import Settings
from kvlite.conversation.sources import Source
from kvlite.documents import Document, read_document
from kvlite.documents.reading_order import Box, lines_of
from kvlite.errors import SettingError, Stopped
from kvlite.methods.engine_config import require_meanings

from .files import Save, encrypted, pdf, read_or_refuse, refusal


def test_pdf_pages_are_remembered(save: Save) -> None:
    document = read_document(save("a.pdf", pdf(["First page", "Zweite Größe", "Third"])))
    assert document.name == "a.pdf"
    assert document.text == "First page\nZweite Größe\nThird"
    assert document.page_starts == (0, 11, 24)
    offsets = (0, 10, 11, 23, 24, len(document.text))
    assert [document.page_of(offset) for offset in offsets] == [1, 1, 2, 2, 3, 3]
    for outside in (-1, len(document.text) + 1):
        with pytest.raises(ValueError, match=r"outside the text's 0\.\."):
            document.page_of(outside)
    # Pages without text count, and so do those beyond the number that it says.
    document = read_document(save("a.pdf", pdf([None, "two", None, "four", None], count=1)))
    assert (document.text, document.page_starts) == ("\ntwo\n\nfour\n", (0, 1, 5, 6, 11))


def test_a_capital_of_several_lines_belongs_to_its_word() -> None:
    """As at the beginning of a chapter."""
    boxes = [
        Box("O", 72, 100, 100, 140),
        Box("nce upon a time", 102, 103, 220, 115),
        Box("was a king", 102, 117, 220, 129),
        Box("of many lands", 72, 131, 220, 143),
    ]
    assert lines_of(boxes) == ["Once upon a time", "was a king", "of many lands"]
    alone = [Box("A", 72, 0, 120, 60), *boxes[1:]]
    assert lines_of(alone) == ["A", "nce upon a time", "was a king", "of many lands"]


def test_pdf_is_known_by_its_first_bytes(save: Save) -> None:
    assert read_document(save("a.txt", pdf(["x y"]))).page_starts == (0,)
    assert read_document(save("a.doc", pdf(["x y"]))).text == "x y"


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
def test_pdf_locked_by_a_password(save: Save, algorithm: str) -> None:
    content = pdf(["secret words"])
    document = read_document(save("open.pdf", encrypted(content, "", algorithm)))
    assert document.text == "secret words"
    assert "password" in refusal(save("shut.pdf", encrypted(content, "user", algorithm)))


def test_scanned_pdf_is_sent_to_ocr(save: Save) -> None:
    message = refusal(save("scan.pdf", pdf([None, None, None])))
    assert "3 pages without any text" in message
    assert "ocrmypdf" in message
    assert "has 1 page without any text" in refusal(save("scan.pdf", pdf([None])))


def test_cut_pdf_is_never_read_in_part(save: Save) -> None:
    content = pdf(["one", "two", "three"])
    end = content.rindex(b"startxref") + 9  # what follows is found without it
    for length in range(5, end, len(content) // 50):
        assert "qpdf" in refusal(save("a.pdf", content[:length]))


def test_pdf_cut_in_its_second_revision_is_not_read_as_its_first(save: Save) -> None:
    content = pdf(["old"])
    revised = content + pdf(["new"])[9:]
    assert read_document(save("a.pdf", content + b"\r\ntrailing mail footer")).text == "old"
    assert "cut short" in refusal(save("a.pdf", revised[: len(content) + 200]))


def test_pdf_that_lacks_a_page_it_declares_is_refused(save: Save) -> None:
    assert "damaged" in refusal(save("a.pdf", pdf(["one"], count=2)))


@pytest.mark.usefixtures("in_child")  # the library remembers the error before
@pytest.mark.parametrize("content", [b"%PDF-1.7\n", b"<html>Not found</html>", pdf([])])
def test_what_is_no_pdf_is_refused(save: Save, content: bytes) -> None:
    assert "no PDF" in refusal(save("a.pdf", content))


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
        # In circles.
        (b"/Kids [5 0 R", b"/Kids [2 0 R"),
        (b"/Kids [5 0 R", b"/Kids [" + b"[" * 50_000),
        (b"/Type /Page ", b"/Annots [5 0 R 5 0 R 3 0 R 99 0 R 7 null (x)] /Type /Page "),
        (b"/Type /Page ", b"/Annots 5 0 R /Type /Page "),
        (b"/Type /Page ", b"/Annots [<< /Subtype /Widget /Parent 5 0 R /V 5 0 R >>] /Type /Page "),
        (b"/Pages 2 0 R", b"/Names (x) /AcroForm [1] /Pages 2 0 R"),
        (b"/Pages 2 0 R", b"/Names << /EmbeddedFiles 1 0 R >> /Pages 2 0 R"),
    ],
)
def test_pdf_with_confused_objects_is_read_or_refused(save: Save, old: bytes, new: bytes) -> None:
    content = pdf(["one", "two"])
    assert old in content
    read_or_refuse(save("a.pdf", content.replace(old, new)))


def laid_out(*lines: tuple[int, int, str]) -> bytes:
    drawn = " ".join(f"BT /F1 10 Tf {x} {y} Td ({text}) Tj ET" for x, y, text in lines)
    return pdf(["x"]).replace(b"BT /F1 12 Tf 72 700 Td (x) Tj ET", drawn.encode())


def test_pdf_three_columns_are_read_one_after_another(save: Save) -> None:
    lines = [
        (40 + 185 * column, 700 - 14 * row, f"Column {column}, line {row} of several.")
        for row in range(8)
        for column in range(3)
    ]
    expected = [text for _, _, text in sorted(lines, key=lambda line: line[0])]
    assert read_document(save("a.pdf", laid_out(*lines))).text == "\n".join(expected)


def drawn(operations: str) -> bytes:
    """A page of these operations."""
    return pdf(["x"]).replace(b"BT /F1 12 Tf 72 700 Td (x) Tj ET", operations.encode("cp1252"))


def test_pdf_words_broken_at_a_line_end_are_joined(save: Save) -> None:
    content = laid_out(
        (72, 700, "The investi-"),
        (72, 688, "gation of COVID-"),
        (72, 676, "19 took from 1990-"),
        (72, 664, "1999, in Austria-"),
        (72, 652, "Hungary."),
    )
    text = "The investigation\nof COVID-\n19 took from 1990-\n1999, in Austria-\nHungary."
    assert read_document(save("a.pdf", content)).text == text


def test_pdf_raised_and_lowered_text_is_marked(save: Save) -> None:
    def small(text: str, rise: int) -> str:
        return f"/F1 6.5 Tf {rise} Ts ({text}) Tj 0 Ts /F1 10 Tf"

    raised, lowered = small("6", 4), small("2", -2)
    content = drawn(
        f"BT /F1 10 Tf 72 700 Td (10) Tj {raised} ( units of H) Tj {lowered} (O in 1990) Tj "
        f"{small('3', 4)} (, the 1) Tj {small('st', 4)} (, A) Tj {small('SMALL', 0)} ET"
    )
    expected = "10^6 units of H_2O in 1990^3, the 1st, ASMALL"
    assert read_document(save("a.pdf", content)).text == expected


def test_pdf_text_that_is_turned_unseen_or_outside(save: Save) -> None:
    content = drawn(
        "BT /F1 12 Tf 3 Tr 72 700 Td (seen by OCR) Tj ET BT 0 Tr /F1 12 Tf 900 700 Td (off) Tj ET "
        "BT /F1 10 Tf 0 1 -1 0 40 100 Tm (up the margin) Tj ET "
        "BT /F1 10 Tf 0 1 -1 0 52 100 Tm (in two lines) Tj ET"
    )
    assert read_document(save("a.pdf", content)).text == "up the margin\nin two lines\nseen by OCR"


def test_pdf_page_that_is_a_drawing_is_named(save: Save) -> None:
    content = pdf(["one", None]).replace(
        b"612 0 0 792 0 0 cm /I1 Do", b"10 10 100 100 re f".ljust(25)
    )
    scanned = "scanned page 2 (the setting ocr reads it)"
    assert read_document(save("a.pdf", content)).not_read == (scanned,)


def test_pdf_pages_are_called_by_their_labels(save: Save) -> None:
    content = pdf(["one", "two", "three"])
    labels = b"/PageLabels << /Nums [0 << /S /r >> 2 << /S /D >>] >> /Pages 2 0 R"
    document = read_document(save("a.pdf", content.replace(b"/Pages 2 0 R", labels)))
    assert document.page_labels == ("i", "ii", "1")
    at = document.text.index
    assert [document.page_label(at(word)) for word in ("two", "three")] == ["ii", "1"]
    assert Source(document, at("two"), at("three")).where == "page ii"
    document = read_document(save("a.pdf", content))
    assert (document.page_labels, document.page_label(5)) == ((), "2")
    assert Document("a.txt", "abc", ()).page_label(1) == ""


# What stands beside the text of pages


def with_annotations(*annotations: dict[str, object]) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(["one", "two"]))))
    every = ArrayObject()
    for each in annotations:
        entries = {NameObject(name): value for name, value in each.items()}
        every.append(writer._add_object(DictionaryObject(entries)))
    fields = ArrayObject(each for each in every if "/FT" in each.get_object())
    form = DictionaryObject({NameObject("/Fields"): fields})
    writer.root_object[NameObject("/AcroForm")] = form
    writer.pages[0][NameObject("/Annots")] = every
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def with_everything() -> bytes:
    """A document of all that is read beside its text."""
    text, name = TextStringObject, NameObject
    return with_annotations(
        {"/Subtype": name("/Widget"), "/FT": name("/Tx"), "/T": text("Name"), "/V": text("Ann")},
        {"/Subtype": name("/Text"), "/Contents": text("Why?"), "/T": text("Cy")},
    )


def test_pdf_fields_and_notes_follow_their_page(save: Save) -> None:
    text, name, number = TextStringObject, NameObject, NumberObject
    field = {"/Subtype": name("/Widget"), "/FT": name("/Tx"), "/V": text("x")}
    box = field | {"/FT": name("/Btn"), "/AP": DictionaryObject()}
    look = {name("/N"): DictionaryObject({name("/Yes"): NullObject(), name("/Off"): NullObject()})}
    box |= {"/AP": DictionaryObject(look)}
    options = ArrayObject([text("red"), text("blue"), text("green")])
    chosen = ArrayObject([text("red"), text("green")])
    content = with_annotations(
        field | {"/T": text("Name"), "/V": text("Ann\nBo")},
        box | {"/T": text("a"), "/TU": text("Agreed"), "/V": name("/Yes"), "/AS": name("/Yes")},
        box | {"/T": text("b"), "/V": name("/Off"), "/AS": name("/Off")},
        field | {"/T": text("c"), "/Ff": number(1 << 13)},
        field | {"/T": text("d"), "/F": number(2)},
        field
        | {"/FT": name("/Ch"), "/T": text("e"), "/Opt": options, "/V": chosen}
        | {"/Ff": number(1 << 21)},
        {"/Subtype": name("/Widget"), "/T": text("of no form"), "/V": text("y")},
        {"/Subtype": name("/Text"), "/Contents": text("Why?"), "/T": text("Cy")},
        {"/Subtype": name("/FreeText"), "/Contents": text("Typed over")},
        {"/Subtype": name("/Text"), "/Contents": text("hidden"), "/F": number(2)},
        {"/Subtype": name("/Link"), "/Contents": text("no")},
        {"/Subtype": name("/FileAttachment")},
    )
    document = read_document(save("a.pdf", content))
    assert document.text == (
        "one\n[Name: Ann Bo]\n[Agreed: Yes]\n[e: red, green]\n[of no form: y]\n"
        "[Note by Cy: Why?]\n[Note: Typed over]\ntwo"
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
@pytest.mark.usefixtures("in_child")
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


def test_pdf_that_unpacks_to_much_is_read_or_refused(save: Save) -> None:
    packed = zlib.compress(b"0 0 m " * 14_000_000)
    content = pdf(["x" * len(packed)])
    line = content[content.rindex(b"stream\nBT") : content.index(b"endstream", -700)]
    stream = b"stream\n" + packed
    content = content.replace(line, stream.ljust(len(line) - 1) + b"\n")
    length = content.rindex(b"<< /Length")
    content = content[:length] + content[length:].replace(
        b"<< /Length", b"<< /Filter /FlateDecode /Length", 1
    )
    assert "1 page without any text" in refusal(save("a.pdf", content))


def test_lone_surrogates_and_nulls_do_not_reach_the_text(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvlite.documents.pdf.page_text", lambda _: "\na\ud83d\r\nb\0 \ud83d\ude00\n"
    )
    assert read_document(save("a.pdf", pdf(["x"]))).text == "a\ufffd\nb 😀"
