"""Every kind of file read, and everything wrong with a file refused in one sentence."""

import builtins
import codecs
import io
import logging
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import docx
import pytest
from pypdf import PdfReader, PdfWriter

from kvlite.documents import Document, read_document
from kvlite.errors import DocumentError, Stopped

Save = Callable[[str, str | bytes], str]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return save


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


# Text


@pytest.mark.parametrize("name", ["a.txt", "a.text", "a.log", "a.csv", "a.rst", "README", "a.py"])
def test_text_is_read_as_it_is(save: Save, name: str) -> None:
    document = read_document(save(name, "  <b>Tom</b> & # Ünï\n\n\n\n\tx \n"))
    assert document == Document(name, "  <b>Tom</b> & # Ünï\n\n\n\n\tx \n", ())
    assert document.page_of(3) is None


@pytest.mark.parametrize("name", ["a.md", "a.markdown", "A.MD"])
def test_markdown_keeps_its_marks(save: Save, name: str) -> None:
    assert read_document(save(name, "# T\n\n<p>*x*</p>\n")).text == "# T\n\n<p>*x*</p>\n"


def test_newlines_become_one_kind(save: Save) -> None:
    assert read_document(save("a.txt", b"a\r\nb\rc\n\r\nd")).text == "a\nb\nc\n\nd"


@pytest.mark.parametrize(
    ("bom", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.html"])
def test_byte_order_marks(save: Save, bom: bytes, encoding: str, name: str) -> None:
    text = "Grüße, 世界\r\n" if name == "a.txt" else "<p>Grüße, 世界</p>"
    expected = "Grüße, 世界\n" if name == "a.txt" else "Grüße, 世界"
    assert read_document(save(name, bom + text.encode(encoding))).text == expected


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "café"),
        ("latin-1", "naïve"),
        ("latin-1", "Le café est très bon, déjà vu à Noël."),
        ("cp1252", "“Größe” und Straße — 50 €"),
        ("cp1250", "Příliš žluťoučký kůň úpěl ďábelské ódy"),
        ("cp1250", "Príliš žltučký kôň, ďakujem vám veľmi pekne"),
        ("cp1251", "Привет, как дела? Это текст."),
        ("koi8_r", "Привет, как дела? Это текст."),
        ("shift_jis", "これは日本語のテキストです。今日は良い天気です。"),
        ("gb18030", "中文文本测试,今天天气很好。"),
    ],
)
def test_older_encodings_are_guessed(save: Save, encoding: str, text: str) -> None:
    assert read_document(save("a.txt", text.encode(encoding))).text == text


def test_text_in_no_encoding_is_refused(save: Save) -> None:
    rng = random.Random(0)
    noise = bytes(rng.randrange(1, 256) for _ in range(400))
    assert "save it as UTF-8" in refusal(save("a.txt", noise))


def test_cut_utf16_is_refused(save: Save) -> None:
    cut = codecs.BOM_UTF16_LE + "abc".encode("utf-16-le")[:-1]
    assert "save it again as UTF-8" in refusal(save("a.txt", cut))


# HTML


def html(save: Save, markup: str | bytes) -> str:
    return read_document(save("a.html", markup)).text


def test_html_gives_its_visible_text(save: Save) -> None:
    text = html(
        save,
        "<!DOCTYPE html><html><head><title>T &amp; x</title><style>p{}</style></head><body>"
        "<script>var a = '<p>no</p>';</script><template>no</template><noscript>no</noscript>"
        "<h1>Head</h1>\n\n<p>One  <b> two</b>,\nthree<!-- no -->.</p>\n<p></p><p>Four</p>"
        "<p hidden>no</p>"
        "<div>a<div>b</div></div>c<br>d<br><br>e</body></html>",
    )
    assert text == "T & x\n\nHead\n\nOne two, three.\n\nFour\n\na\nb\nc\nd\n\ne"


def test_html_lists(save: Save) -> None:
    markup = "<p>x<ul><li><p>a</p></li>\n<li>b<ul><li>c</li></ul></li></ul><ol><li>d<li>e</ol>f"
    assert html(save, markup) == "x\n- a\n- b\n- c\n1. d\n2. e\n\nf"


def test_html_tables_keep_their_cells_apart(save: Save) -> None:
    text = html(
        save,
        "<table><thead><tr><th></th><th>Price</th></tr></thead>\n<tr>\n<td><p>Pear</p></td>\n"
        "<td><p>3</p></td>\n</tr><tr><td>Fig<td>4</table>",
    )
    assert text == "| Price\nPear | 3\nFig | 4"
    assert html(save, "<p>a</p><table><tr></tr></table><p>b</p>") == "a\n\nb"


@pytest.mark.parametrize("markup", ["<p>x{}y</p>", "<pre>{}</pre>z", "<td>x{}<td>y"])
@pytest.mark.parametrize("space", ["&nbsp;", "\t", "\xa0 "])
def test_html_with_much_space_is_read_in_time(save: Save, markup: str, space: str) -> None:
    """A pattern that tries every start of a run of spaces would take minutes."""
    text = html(save, markup.format(space * 200_000))
    assert len(text) < 500_000


def test_html_that_its_parser_cannot_take_is_refused(save: Save) -> None:
    message = refusal(save("big.html", f"<p>x &#{'9' * 5000}; y</p>"))
    assert "cannot be read as HTML" in message


def test_html_preformatted_text_keeps_its_indentation(save: Save) -> None:
    markup = "<p>x</p><pre>def  f():\n    return 1<br>  # end</pre>y"
    assert html(save, markup) == "x\n\ndef  f():\n    return 1\n  # end\n\ny"


def test_html_encoding_is_utf8_then_what_the_page_declares(save: Save) -> None:
    declared = '<meta charset="cp1254"><p>güneşli bir gün, çok şükür</p>'
    assert html(save, declared.encode("cp1254")) == "güneşli bir gün, çok şükür"
    declared = '<meta charset="cp866"><p>Привет, как дела?</p>'
    assert html(save, declared.encode("cp866")) == "Привет, как дела?"
    assert html(save, '<meta charset="cp866"><p>Grüße</p>'.encode()) == "Grüße"
    assert html(save, '<meta charset="nonsense"><p>Grüße aus Köln</p>'.encode("latin-1")) == (
        "Grüße aus Köln"
    )


@pytest.mark.parametrize("name", ["a.htm", "a.xhtml", "A.HTML"])
@pytest.mark.filterwarnings("error")
def test_xhtml_is_read_without_warnings(save: Save, name: str) -> None:
    markup = '<?xml version="1.0"?><body><p>a <![CDATA[& b]]></p></body>'
    assert read_document(save(name, markup)).text == "a & b"
    assert read_document(save(name, "https://example.org/")).text == "https://example.org/"


def test_html_with_many_gaps_takes_no_quadratic_time(save: Save) -> None:
    def seconds(gaps: int) -> float:
        markup, start = "a" + "<p> </p>" * gaps + "b", time.thread_time()
        assert html(save, markup) == "a\n\nb"
        return time.thread_time() - start

    few, many = (min(seconds(gaps) for _ in range(5)) for gaps in (1500, 6000))
    assert many < 9 * few  # or 16 times that


def test_html_may_nest_deeper_than_python_recurses(save: Save) -> None:
    assert html(save, "<div>" * 3000 + "x") == "x"


def test_html_without_visible_text_is_refused(save: Save) -> None:
    assert "holds no text" in refusal(save("a.html", "<html><script>x</script><p> </p></html>"))


def test_markup_the_parser_rejects_is_refused(save: Save) -> None:
    assert "save it as text" in refusal(save("a.html", "<p>a<![foo bar]]>"))


# PDF


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


def test_lone_surrogates_and_nulls_do_not_reach_the_text(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pypdf.PageObject.extract_text", lambda _: "\na\ud83d\r\nb\0 \ud83d\ude00\n"
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


def mutations(content: bytes, count: int) -> list[bytes]:
    """The content cut, with bytes changed, with bytes gone, and with its syntax confused."""
    rng = random.Random(1)
    syntax = [i for i, byte in enumerate(content) if byte in b"0123456789<>[]()/R"]
    mutants = []
    for i in range(count):
        mutant = bytearray(content)
        place = rng.randrange(5, len(content))
        if i % 4 == 0:
            del mutant[place:]
        elif i % 4 == 1:
            del mutant[place : place + rng.choice((1, 20, 200))]
        for _ in range(rng.choice((1, 3, 20)) if i % 4 == 2 else 0):
            mutant[rng.randrange(5, len(mutant))] = rng.randrange(256)
        for _ in range(rng.choice((1, 2, 8)) if i % 4 == 3 else 0):
            mutant[rng.choice(syntax)] = rng.choice(b"0123456789<>[]()/R -")
        mutants.append(bytes(mutant))
    return mutants


def read_or_refuse(path: str) -> bool:
    try:
        document = read_document(path)
    except DocumentError as error:
        assert path in str(error)
        return False
    assert document.text.encode()
    return True


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


# Word


def example(document: "docx.document.Document") -> None:
    document.add_heading("Title", 1)
    document.add_paragraph("Before.")
    table = document.add_table(3, 3)
    for row in range(3):
        for column in range(3):
            table.cell(row, column).text = f"{row}{column}"
    table.cell(1, 0).merge(table.cell(1, 1)).text = "wide"
    table.cell(2, 2).text = "two\nlines"
    inner = table.cell(0, 0).add_table(1, 2)
    inner.cell(0, 0).text, inner.cell(0, 1).text = "in", "ner"
    document.add_paragraph("After,\twith a tab\nand a line.")


def test_word_paragraphs_and_tables_in_order(save: Save) -> None:
    document = read_document(save("a.docx", word(example)))
    assert document == Document(
        "a.docx",
        "Title\nBefore.\n00 in | ner | 01 | 02\nwide | 12\n20 | 21 | two lines\n"
        "After,\twith a tab\nand a line.",
        (),
    )


def test_word_is_known_by_its_contents(save: Save) -> None:
    content = word(lambda document: document.add_paragraph("hello"))
    assert read_document(save("a.txt", content)).text == "hello"
    assert read_document(save("a.pdf", content)).text == "hello"


def test_word_form_fields_and_tracked_changes(save: Save) -> None:
    """What Word shows with the changes accepted; python-docx alone would leave most of it out."""

    def run(text: str) -> str:
        return f"<w:r><w:t>{text}</w:t></w:r>"

    body = (
        f"<w:sdt><w:sdtPr/><w:sdtContent><w:p>{run('block')}</w:p></w:sdtContent></w:sdt><w:p>"
        f"{run('a')}<w:ins><w:sdt><w:sdtContent>{run('b')}</w:sdtContent></w:sdt></w:ins>"
        f"<w:del><w:r><w:delText>no</w:delText></w:r></w:del><w:moveFrom>{run('no')}</w:moveFrom>"
        f"<w:moveTo>{run('c')}</w:moveTo><w:smartTag>{run('d')}</w:smartTag>"
        f"<w:fldSimple>{run('e')}</w:fldSimple></w:p>"
    )
    content = rezipped(
        word(lambda document: None),
        "word/document.xml",
        lambda xml: xml.replace(b"<w:body>", b"<w:body>" + body.encode()),
    )
    assert read_document(save("a.docx", content)).text == "block\nabcde"


def test_word_without_text_is_refused(save: Save) -> None:
    assert "holds no text" in refusal(save("a.docx", word(lambda document: document)))


@pytest.mark.parametrize("content", [b"plain words", b"PK\3\4 but no archive"])
def test_what_is_no_word_file_is_refused(save: Save, content: bytes) -> None:
    assert "save it again as .docx" in refusal(save("a.docx", content))


def test_word_file_locked_by_a_password_is_refused(save: Save) -> None:
    assert "without a password" in refusal(save("a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0\0"))


def test_mutated_word_file_is_read_or_refused(save: Save) -> None:
    content = word(example)
    for mutant in mutations(content, 60):
        read_or_refuse(save("a.docx", mutant))
    for part in ("word/document.xml", "[Content_Types].xml", "_rels/.rels"):
        xml = zipfile.ZipFile(io.BytesIO(content)).read(part)
        for mutant in mutations(xml, 12):
            read_or_refuse(save("a.docx", rezipped(content, part, lambda _, new=mutant: new)))
    for old, new in ((b"w:body", b"w:bodi"), (b"w:tblGrid", b"w:grid"), (b"w:tc>", b"w:tx>")):
        broken = rezipped(content, "word/document.xml", lambda xml, a=old, b=new: xml.replace(a, b))
        read_or_refuse(save("a.docx", broken))


def test_word_file_with_damaged_data_is_refused(save: Save) -> None:
    content = word(example)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", method) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        damaged = bytearray(out.getvalue())
        start = damaged.index(b"word/document.xml") + len("word/document.xml")
        for i in range(start + 16, start + 28):
            damaged[i] ^= 0xFF
        assert "is damaged" in refusal(save("a.docx", bytes(damaged)))


def test_word_file_shorter_than_its_directory_says_is_refused(save: Save) -> None:
    content = bytearray(rezipped(word(example), "", lambda part: part))
    entry = content.rindex(b"PK\1\2")
    content[entry + 20 : entry + 28] = (10**9).to_bytes(4, "little") * 2
    assert "is damaged" in refusal(save("a.docx", bytes(content)))


# Standard input


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_stdin(monkeypatch, "Grüße\r\n".encode()) == Document("stdin", "Grüße\n", ())
    assert read_stdin(monkeypatch, pdf(["one", "two"])) == Document("stdin", "one\ntwo", (0, 4))
    content = word(lambda document: document.add_paragraph("hello"))
    assert read_stdin(monkeypatch, content).text == "hello"
    assert read_stdin(monkeypatch, b"\n<!doctype HTML><p>a<p>b").text == "a\n\nb"
    assert read_stdin(monkeypatch, b"<p>a fragment").text == "<p>a fragment"


@pytest.mark.parametrize("content", [b"", b" \n", b"\x7fELF\0\0", pdf(["x"])[:80], pdf([None])])
def test_bad_standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(content))
    with pytest.raises(DocumentError, match=r"^standard input "):
        read_document("-")


# What is not there, or not text


def test_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There is no file" in refusal(str(tmp_path / "none.txt"))
    monkeypatch.chdir(tmp_path)
    assert f"from {tmp_path}" in refusal("none.txt")
    (tmp_path / "file").write_text("x")
    assert "There is no file" in refusal("file/below.txt")


def test_folder(tmp_path: Path) -> None:
    assert "is a folder" in refusal(str(tmp_path))


def test_file_one_may_not_read(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save("a.txt", "x")

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(builtins, "open", forbidden)
    with pytest.raises(DocumentError, match=r"may not be read by you.*chmod"):
        read_document(path)


@pytest.mark.parametrize("path", ["a" * 5000, "nul\0byte"])
def test_impossible_path(path: str) -> None:
    with pytest.raises(DocumentError, match=r"cannot be read \("):
        read_document(path)


@pytest.mark.parametrize("name", ["a.txt", "a.pdf", "a.docx", "a.html", "a.odt", "a"])
@pytest.mark.parametrize("content", [b"", b" \r\n\t \n", codecs.BOM_UTF16_LE + b"\n\0"])
def test_empty_file(save: Save, name: str, content: bytes) -> None:
    if content.startswith(codecs.BOM_UTF16_LE) and name not in ("a.txt", "a"):
        pytest.skip("not empty to this format")
    assert "holds no text" in refusal(save(name, content))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a.doc", ".docx"),
        ("a.ODT", ".docx"),
        ("a.xlsx", ".docx"),
        ("a.rtf", ".docx"),
        ("a.epub", "ebook-convert"),
        ("a.png", "OCR"),
        ("a.tar.gz", "unpack"),
    ],
)
def test_known_formats_kvlite_does_not_read(save: Save, name: str, remedy: str) -> None:
    assert remedy in refusal(save(name, "even where the content is text"))


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.csv", "a", "a.bin"])
def test_binary_file(save: Save, name: str) -> None:
    assert "binary data" in refusal(save(name, b"\x7fELF some text\0 and more"))


def test_utf16_without_a_mark_is_refused_with_the_remedy(save: Save) -> None:
    assert "save it as UTF-8" in refusal(save("a.txt", "words".encode("utf-16-le")))


def test_other_archives_and_rich_text_are_known_by_their_contents(save: Save) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("xl/workbook.xml", "<x/>")
    assert "binary data" in refusal(save("a.txt", out.getvalue()))
    assert read_document(save("b.txt", "<html><p>a")).text == "<html><p>a"
    assert "save it as .docx" in refusal(save("a.txt", r"{\rtf1\ansi words}"))


def test_parsers_are_imported_only_when_needed() -> None:
    code = (
        "import sys, kvlite.documents; print({'pypdf', 'docx', 'bs4', 'charset_normalizer'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- long ones -----------------------------------------------------------------------------------


def paragraphs(document: Any) -> None:
    for number in range(4):
        document.add_paragraph(f"Paragraph {number}")


@pytest.mark.parametrize(
    ("name", "content", "total"),
    [
        ("a.pdf", pdf(["one", "two", "three"]), 3),
        ("a.docx", word(paragraphs), 5),
    ],  # and a section's end
    ids=["pdf", "word"],
)
def test_opening_tells_how_far_it_is_and_can_be_stopped(
    save: Save, name: str, content: bytes, total: int
) -> None:
    path, told, cancel = save(name, content), list[tuple[int, int]](), Event()

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        cancel.set()

    whole = read_document(path, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, total) for done in range(1, len(told) + 1)]
    assert len(told) == len(whole.text.splitlines()) >= 3
    told.clear()
    with pytest.raises(Stopped):
        read_document(path, progress=stop, cancel=cancel)
    assert told == [(1, total)]
