"""Mail: every part that a reader would see, and names for the rest."""

import codecs
import lzma
from pathlib import Path

import pytest

from kvlite.documents import Document, read_document
from kvlite.documents.outlook import unpacked_rich_text

from .files import Save, refusal

DATA = Path(__file__).parent / "data"
PLAIN = "Content-Type: text/plain; charset=utf-8\n\n"
PAGE = "Content-Type: text/html; charset=utf-8\n\n"
PICTURE = "Content-Type: image/png; name=logo.png\nContent-ID: <a>\n\nx"
INVITATION = """Content-Type: text/calendar; charset=utf-8; method=REQUEST

BEGIN:VCALENDAR
BEGIN:VTIMEZONE
DTSTART:19700101T000000
END:VTIMEZONE
BEGIN:VEVENT
DTSTART;TZID=Europe/Berlin:20260105T093000
DTEND;TZID=Europe/Berlin:20260105T100000
SUMMARY;LANGUAGE=en:Budget\\, again
LOCATION:Room
  7
END:VEVENT
END:VCALENDAR"""


CALENDAR = """BEGIN:VCALENDAR
BEGIN:VEVENT
SUMMARY:One
DESCRIPTION:Bring\\nfood
DTSTART;VALUE=DATE:20260105
BEGIN:VALARM
DESCRIPTION:Reminder
END:VALARM
END:VEVENT
BEGIN:VTODO
SUMMARY:Pay
DUE:20260106T093000
END:VTODO
END:VCALENDAR"""


def attached(name: str, kind: str = "application/pdf") -> str:
    return f"Content-Type: {kind}\nContent-Disposition: attachment; filename={name}\n\nx"


def several(kind: str, *parts: str) -> str:
    edge = kind[:3].upper()
    inside = "".join(f"--{edge}\n{part}\n" for part in parts)
    return f"Content-Type: multipart/{kind}; boundary={edge}\n\n{inside}--{edge}--"


def read(save: Save, message: str) -> Document:
    return read_document(save("a.eml", f"Subject: Hi\nMIME-Version: 1.0\n{message}\n"))


@pytest.mark.parametrize(
    ("message", "text", "not_read"),
    [
        (several("alternative", PAGE + "<p>In May.</p>", PLAIN + "May"), "May", ()),
        (
            several("mixed", PLAIN + "One.", attached("a.pdf"), attached("b.txt", "text/plain")),
            "One.", ("2 attached files (a.pdf, b.txt)",),
        ),
        # Apple's: what is attached lies beside the page.
        (
            several(
                "alternative", PLAIN + "One.",
                several("mixed", PAGE + "<p>One.</p>", attached("a.pdf"), PAGE + "<p></p>"),
            ),
            "One.", ("1 attached file (a.pdf)",),
        ),
        (
            several("related", PAGE + "<p>One.</p><img src='cid:a'>", PICTURE),
            "One.", ("1 picture",),
        ),
        (
            several(
                "alternative", PLAIN + "One.",
                several("related", PAGE + "<img src='cid:a'>", PICTURE),
            ),
            "One.", ("1 picture (logo.png)",),
        ),
        (
            several("alternative", PLAIN + "Come.", PAGE + "Come", INVITATION),
            "Come.\n\nBegins: 2026-01-05 09:30 Europe/Berlin\n"
            "Ends: 2026-01-05 10:00 Europe/Berlin\nEvent: Budget, again\nPlace: Room 7", (),
        ),
        (
            several(
                "mixed", PLAIN + "See.",
                f"Content-Type: message/rfc822\n\nFrom: b@x.example\nSubject: Old\n{PLAIN}Sold.",
            ),
            "See.\n\nFrom: b@x.example\nSubject: Old\n\nSold.", (),
        ),
        (
            several(
                "report", PLAIN + "No.",
                "Content-Type: message/delivery-status\n\nAction: failed\n\nStatus: 4.2.2",
            ),
            "No.\n\nAction: failed\n\nStatus: 4.2.2", (),
        ),
        (
            several(
                "signed", PLAIN + "One.",
                "Content-Type: application/pgp-signature; name=a.asc\n\nx",
            ),
            "One.", ("1 signature (a.asc)",),
        ),
        (
            "Content-Type: application/pkcs7-mime; smime-type=enveloped-data; name=smime.p7m\n\nM",
            "", ("1 encrypted or signed part (smime.p7m)",),
        ),
        (
            several("encrypted", "Content-Type: application/pgp-encrypted\n\nVersion: 1"),
            "", ("1 encrypted part (multipart/encrypted)",),
        ),
        ("Content-Type: image/png\n\nx", "", ("1 picture (image/png)",)),
        ("Content-Type: text/rtf\n\n{\\rtf1 In \\b May\\b0}", "In May", ()),
        (
            several("mixed", "Content-Type: text/calendar\n\n" + CALENDAR),
            "Event: One\nDescription: Bring food\nBegins: 2026-01-05\n\n"
            "Task: Pay\nDue: 2026-01-06 09:30", (),
        ),
        ("Content-Type: text/calendar\n\nBEGIN:VCALENDAR\nX:1", "BEGIN:VCALENDAR\nX:1", ()),
        # What is only a hint that there is a page.
        (
            several(
                "alternative", PLAIN + "Your program shows no HTML.",
                several("related", PAGE + f"<p>{'In May. ' * 40}<img src=cid:a>", PICTURE),
                attached("a.ics", "text/calendar"),
            ),
            ("In May. " * 40).strip(), ("1 picture", "1 attached file (a.ics)"),
        ),
        (
            several("mixed", "Content-Type: message/external-body; access-type=URL\n\n\n"),
            "", ("1 external part (message/external-body)",),
        ),
        (
            "Content-Type: message/partial; number=1\n\nx",
            "", ("1 partial message (message/partial)",),
        ),
    ],
)  # fmt: skip
def test_what_a_message_holds(
    save: Save, message: str, text: str, not_read: tuple[str, ...]
) -> None:
    document = read(save, message)
    assert document.text == f"Subject: Hi\n\n{text}".strip()
    assert document.not_read == not_read


@pytest.mark.parametrize(
    ("declared", "encoding"), [("gb2312", "utf-8"), ("gb2312", "gb18030"), ("banana", "utf-8")]
)
def test_a_body_is_in_the_encoding_that_it_can_be_in(
    save: Save, declared: str, encoding: str
) -> None:
    said = "你们看看这个是什么屄，张经理"
    head = f"Subject: Hi\nContent-Type: text/plain; charset={declared}\n\n".encode()
    document = read_document(save("a.eml", head + said.encode(encoding)))
    assert (document.text, document.note) == (f"Subject: Hi\n\n{said}", "")


def unpacked(name: str) -> bytes:
    return lzma.decompress((DATA / f"{name}.msg.xz").read_bytes())


def outlook(save: Save, name: str) -> Document:
    return read_document(save("a.msg", unpacked(name)))


def test_what_cannot_be_decoded_is_not_said_to_be(save: Save) -> None:
    head = "Content-Type: text/plain\nContent-Transfer-Encoding: base64\n\n"
    assert "read as" not in read(save, head + "This is not base64, but text!").note


def test_an_outlook_body_in_rich_text_alone(save: Save) -> None:
    plain, gone = (f"__substg1.0_{each}001F".encode("utf-16-le") for each in ("1000", "1FFF"))
    assert plain in unpacked("outer")
    document = read_document(save("a.msg", unpacked("outer").replace(plain, gone)))
    assert document.text.count("\n\nOuter body\n\n") == 1
    assert document.text.endswith("\n\nbody")
    assert document.note == ""


@pytest.mark.parametrize(
    ("packed", "text"),
    [  # examples of Microsoft's [MS-OXRTFCP], and what is not packed
        (
            "2d0000002b0000004c5a4675f1c5c7a703000a007263706731323542320af32068656c0900206277"
            "05b06c647d0a800fa0", b"{\\rtf1\\ansi\\ansicpg1252\\pard hello world}\r\n",
        ),
        ("1a0000001c0000004c5a4675e2d44b51410004205758595a0d6e7d010eb0",
         b"{\\rtf1 WXYZWXYZWXYZWXYZWXYZ}"),
        ("1300000007000000" + b"MELA".hex() + "00000000" + b"{\\rtf1}".hex(), b"{\\rtf1}"),
        ("1a0000001c0000004c5a4675e2d44b514100", b""),
    ],
)  # fmt: skip
def test_rich_text_is_unpacked(packed: str, text: bytes) -> None:
    assert unpacked_rich_text(bytes.fromhex(packed)) == text


def test_messages_of_outlook(save: Save) -> None:
    """Of the tests of msg-parser, with a message attached, and of Apache POI, in code page 1251."""
    document = outlook(save, "outer")
    assert document.text == (
        "To: outer@foo.bar\nDate: 2016-11-15 23:29 UTC\nSubject: outer subject\n\nOuter body\n\n"
        "To: test@foobar.com\nDate: 2016-11-15 23:28 UTC\nSubject: test\n\nbody"
    )
    assert document.note == ""
    document = outlook(save, "cyrillic")
    assert document.text.startswith(
        "From: no-reply@niips.ru <no-reply@niips.ru>\nTo: Свиридов Дмитрий Владимирович\n"
    )
    assert "Сообщение передано в обработку 18.05.2010 11:38:39" in document.text
    assert document.note == ""


def test_what_is_no_message_of_outlook_is_refused(save: Save) -> None:
    assert "is damaged or no message of Outlook's" in refusal(save("a.msg", "words"))


@pytest.mark.parametrize(
    ("encoding", "encoded"),
    [("base64", "base64_codec"), ("quoted-printable", "quopri_codec"), ("base64", "")],
)
def test_a_forwarded_message_that_is_encoded_as_a_whole_is_read(
    save: Save, encoding: str, encoded: str
) -> None:
    """Or only said to be."""
    inner = "From: a@b.c\nSubject: Inner\n\nHello, Zo\u00eb".encode()
    body = codecs.encode(inner, encoded) if encoded else inner
    head = "Subject: Outer\nContent-Type: message/rfc822\n"
    head += f"Content-Transfer-Encoding: {encoding}\n\n"
    read = read_document(save("a.eml", head.encode() + body))
    assert read.text == "Subject: Outer\n\nFrom: a@b.c\nSubject: Inner\n\nHello, Zo\u00eb"


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_headers_in_bytes_that_nothing_names_are_read(save: Save, encoding: str) -> None:
    mail = "From: Jos\u00e9 <j@m.de>\nSubject: Gr\u00f6\u00dfe der Stra\u00dfe\n\nText"
    assert read_document(save("a.eml", mail.encode(encoding))).text == mail
