"""Decoding text, in whatever encoding it is."""

import codecs
import re
from math import inf
from unicodedata import category

from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError, SettingError

_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16: its mark begins the same
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# Left to all that it knows, chardet takes a few accents for Icelandic or DOS Hebrew.
_GUESSED = (
    "utf-16-le utf-16-be utf-32-le utf-32-be cp1250 cp1251 cp1252 cp1253 cp1254 cp1255 cp1256 "
    "cp1257 cp1258 cp874 cp437 cp737 cp850 cp852 cp857 cp866 cp1125 koi8-r koi8-u iso8859-2 "
    "iso8859-5 iso8859-6 iso8859-7 iso8859-8 iso8859-9 iso8859-13 iso8859-15 mac-roman "
    "mac-cyrillic cp932 euc-jp gb18030 big5hkscs cp949 johab"
)
# Confidence below which the commonest encoding is likelier than the guess, found on short texts.
_WEAK = 0.06
# How much of a text is looked at for what no text has: controls, and two scripts in a word.
_LOOK = 1000
_ODD = re.compile(
    "(?i)[\x80-\x9f]|[a-z][\u0370-\u1cff\u2500-\u259f]|[\u0370-\u1cff\u2500-\u259f][a-z]"
)
# Texts that say that they are in the first use what the second has besides.
_LARGER = {
    "iso8859-1": "cp1252", "iso8859-9": "cp1254", "tis-620": "cp874", "shift_jis": "cp932",
    "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "euc_kr": "cp949",
}  # fmt: skip


def require_encoding(name: str) -> None:
    """Raises SettingError if there is no encoding of this name; "" leaves it open."""
    try:
        " ".encode(name or "utf-8")
    except (LookupError, ValueError):
        raise SettingError(
            f"--encoding must be an encoding of text, such as windows-1254, not {name!r}"
        ) from None


def declared_in(page: bytes) -> str:
    """The encoding that an HTML or XML page says it is in, or ""."""
    from bs4.dammit import EncodingDetector

    name = EncodingDetector.find_declared_encoding(page, is_html=True) or ""
    # What can be read so is in no UTF-16, whatever it says.
    return "" if name.lower().startswith("utf-16") else name


def decoded(data: bytes, tracker: Tracker, declared: str = "") -> str:
    """Bytes as text; what was assumed, replaced or left out is noted.

    Args:
        declared: the encoding that they are said to be in.

    Raises:
        DocumentError: they are no text, or in no encoding that could be recognized.
    """
    mark = next(filter(data.startswith, _MARKS), b"")
    body = data[len(mark) :]
    if not mark and b"\0" not in body.rstrip(b"\0"):  # else they may be of UTF-16
        body = body.rstrip(b"\0")
    utf8 = "" if b"\0" in body else "utf-8"
    ways = (
        (_MARKS.get(mark, ""), inf),
        ("" if not declared or body.isascii() else utf8, 0),
        *((declared, 0), (tracker.encoding, inf)),
        ("iso2022_jp_2" if b"\x1b$" in body else "", 0),
        *((utf8, 0), (declared, 1), (utf8, 1)),
    )
    tries = (_decoded(body, name, tracker, damage) for name, damage in ways if name)
    text = next((each for each in tries if each is not None), None)
    text = _guessed(body, tracker) if text is None else text
    if text is None or "\0" in text.rstrip("\0"):
        what = "is in no encoding kvlite can recognise: name it by the setting encoding, or"
        if b"\0" in data:
            what = "holds binary data, not text: convert it to text or PDF first, or if it is text"
        raise DocumentError(f"{tracker.label} {what} save it as UTF-8.")
    kept = text.rstrip("\0")
    if gone := len(data) - len(mark) - len(body) + len(text) - len(kept):
        tracker.assumed.append(f"{gone:,} NUL{'s' * (gone > 1)} at its end left out")
    return kept


def _decoded(data: bytes, name: str, tracker: Tracker, damage: float = inf) -> str | None:
    """Bytes in an encoding, with U+FFFD where they are none of it; None if that is more often than
    `damage` times for each character beyond ASCII."""
    try:
        encoding = _LARGER.get(codecs.lookup(name).name, name)
        return data.decode(encoding)
    except LookupError:
        return None
    except UnicodeError:
        kept, text = (data.decode(encoding, errors) for errors in ("ignore", "replace"))
    places = text.count("\ufffd") - kept.count("\ufffd")
    if damage < inf and places > damage * (len(kept) - len(kept.encode("ascii", "ignore"))):
        return None
    tracker.assumed.append(
        f"U+FFFD stands for what is no {name.upper()} in {places:,} place{'s' * (places > 1)}"
    )
    return text


def _guessed(data: bytes, tracker: Tracker) -> str | None:
    """Bytes in the encoding that they are most likely in; None if they are in none."""
    from chardet import detect_all

    found = detect_all(
        data, ignore_threshold=True, max_bytes=len(data), include_encodings=_GUESSED.split()
    )
    sure = {each["encoding"] or "": each["confidence"] for each in found}
    runs = re.findall(rb"[ -~]?[\x80-\xff]+[ -~]?", data)[:_LOOK]
    odd = {name: _ODD.findall(b" ".join(runs).decode(name or "ascii", "ignore")) for name in sure}
    names = [name for name in sure if 4 * len(odd[name]) <= len(runs)] or [*sure]
    name = "Windows-1252" if sure[names[0]] < _WEAK and "Windows-1252" in names else names[0]
    text = _decoded(data, name, tracker)
    if b"\0" in data and {"Cn", "Co"} & set(map(category, (text or "")[:_LOOK])):
        return None
    if text is not None:
        tracker.assumed.append(f"read as {name} (the setting encoding names another)")
    return text
