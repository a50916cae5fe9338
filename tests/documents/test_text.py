"""Text in every encoding, read or refused in one sentence."""

import codecs
import random
import re

import pytest

from kvlite.config.settings import Settings
from kvlite.documents import Document, read_document
from kvlite.errors import SettingError
from kvlite.methods.engine_config import require_meanings

from .files import Save, refusal


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.rst", "README", "a.py", "a.md", "A.MD"])
def test_text_is_read_as_it_is(save: Save, name: str) -> None:
    text = "  <b>Tom</b> & # Ünï\n\n\n\n\tx \n"
    document = read_document(save(name, text))
    assert document == Document(name, text, ())
    assert document.page_of(3) is None
    assert read_document(save(name, b"a\r\nb\rc\n\r\nd")).text == "a\nb\nc\n\nd"


@pytest.mark.parametrize("encoding", ["utf_8", "utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be"])
def test_byte_order_marks(save: Save, encoding: str) -> None:
    mark = getattr(codecs, f"BOM_{encoding.upper().replace('UTF_', 'UTF')}")
    for name, text in (("a.txt", "Grüße, 世界\r\n"), ("a.html", "<p>Grüße, 世界</p>")):
        read = read_document(save(name, mark + text.encode(encoding))).text
        assert read.strip() == "Grüße, 世界"


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
        ("big5", "會議記錄：預算為三百萬元。"),
        ("cp949", "안녕하세요. 계약서 제1조: 갑은 을에게 대금을 지급한다."),
        ("cp1251", "Настройте IP-адрес и SMSки."),
        ("cp866", "Договор аренды. Арендатор: Иванов. Сумма: 15 000 руб."),
        ("cp1253", "Μισθωτήριο: ο ενοικιαστής πληρώνει 500 € το μήνα."),
        ("cp1254", "Kiracı her ayın beşinde öder. İstanbul, Şişli, ığdır"),
        ("cp1255", 'חוזה שכירות: השוכר ישלם 5000 ש"ח.'),
        ("cp1256", "عقد إيجار: يدفع المستأجر 5000 دينار شهريا."),
        ("cp874", "สัญญาเช่า ผู้เช่าชำระเงิน 5000 บาท"),
        ("cp1250", "Umowa najmu: Najemca płaci 5 000 zł miesięcznie. Łódź, źdźbło"),
        ("cp850", "Rechnung\nMüller, Köln, Straße 5, Größe: äußerst groß\n" * 5),
        ("utf-16-le", "会议记录\n出席：王小明、李雷。\n"),
        ("utf-16-be", "Name;Ort\nMüller;Köln\n"),
        ("utf-32-le", "Name;Ort\nMüller;Köln\n"),
    ],
)
def test_older_encodings_are_guessed_and_named(save: Save, encoding: str, text: str) -> None:
    document = read_document(save("a.txt", text.encode(encoding)))
    assert document.text == text
    named = r"a\.txt: read as \S+ \(the setting encoding names another\)"
    assert re.fullmatch(named, document.note)


def test_japanese_of_seven_bits_is_known_by_its_escapes(save: Save) -> None:
    text = "御見積書\n合計金額は十二万三千円です。\n"
    assert read_document(save("a.txt", text.encode("iso2022_jp"))) == Document("a.txt", text, ())
    assert read_document(save("a.log", b"\x1b[31mred\x1b(B\x1b$ ls")).text.endswith(" ls")


@pytest.mark.parametrize(
    ("content", "text", "note"),
    [
        (b"Total 500\n" + bytes(300), "Total 500\n", "300 NULs at its end left out"),
        (
            codecs.BOM_UTF16_LE + "abc".encode("utf-16-le")[:-1],
            "ab\ufffd",
            "U+FFFD stands for what is no UTF-16-LE in 1 place",
        ),
        (
            "übung\n".encode() * 3 + "übung\n".encode("latin-1") * 3,
            "übung\n" * 3 + "\ufffdbung\n" * 3,
            "U+FFFD stands for what is no UTF-8 in 3 places",
        ),
    ],
    ids=["NULs", "cut", "mixed"],
)
def test_what_is_nearly_text(save: Save, content: bytes, text: str, note: str) -> None:
    document = read_document(save("a.txt", content))
    assert (document.text, document.note) == (text, f"a.txt: {note}")


@pytest.mark.parametrize("name", ["a.txt", "a.html"])
def test_an_encoding_that_is_set(save: Save, name: str) -> None:
    text = "Noël à Zoë"
    path = save(name, text.encode("mac_roman"))
    assert read_document(path, encoding="macintosh") == Document(name, text, ())
    damaged = read_document(save(name, b"a\x81b"), encoding="cp1252")
    assumed = ("U+FFFD stands for what is no CP1252 in 1 place",)
    assert (damaged.text, damaged.assumed) == ("a\ufffdb", assumed)
    declared = f"<meta charset='cp1252'>{text}"
    assert read_document(save("b.html", declared.encode("cp1252")), encoding="cp866").text == text


@pytest.mark.parametrize("name", ["nonsense", "rot13", "undefined", "a\0"])
def test_an_encoding_that_there_is_not(name: str) -> None:
    with pytest.raises(SettingError, match=r"^--encoding must be an encoding of text"):
        require_meanings(Settings(encoding=name))


def test_text_in_no_encoding_is_refused(save: Save) -> None:
    rng = random.Random(0)
    noise = bytes(rng.randrange(1, 256) for _ in range(400))
    assert "save it as UTF-8" in refusal(save("a.txt", noise))
    assert "binary data" in refusal(save("b.txt", b"line 1\n\0\0\0\nline 2: total 500\n"))
