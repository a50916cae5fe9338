"""Word documents read as Word shows them, or refused."""

import io
import zipfile

import docx
import pytest

from kvlite.documents import Document, read_document

from .files import Save, refusal, rezipped, word


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
        "Title\nBefore.\n00 in | ner | 01 | 02\nwide | wide | 12\n20 | 21 | two lines\n"
        "After,\twith a tab\nand a line.",
        (),
    )


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
    assert "damaged or no Word document" in refusal(save("a.docx", content))


def test_word_file_locked_by_a_password_is_refused(save: Save) -> None:
    assert "without a password" in refusal(save("a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0\0"))


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
    entry = content.rindex(b"PK\1\2", 0, content.rindex(b"word/document.xml"))
    content[entry + 20 : entry + 28] = (10**9).to_bytes(4, "little") * 2
    assert "is damaged" in refusal(save("a.docx", bytes(content)))
