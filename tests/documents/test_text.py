"""Text in every encoding, read or refused in one sentence."""

import codecs
import random

import pytest

from kvlite.documents import Document, read_document

from .files import (
    Save,
    refusal,
)


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
