"""Outlook's messages (.msg): each property a stream of an OLE file, named by number and type."""

import io
import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from kvlite.documents.html import html_page
from kvlite.documents.plain_text import decoded
from kvlite.documents.rtf import rtf_text
from kvlite.documents.tracker import Tracker

_SENDER, _ADDRESSES = "0C1A", ("5D01", "0C1F")
_RECIPIENTS, _COPIED, _SUBJECT = "0E04", "0E03", "0037"
_BODY, _PAGE, _RICH_TEXT = "1000", "1013", "1009"
_NAMES, _MESSAGE = ("3707", "3704", "3001"), "__substg1.0_3701000D"
_SENT, _CODE_PAGES = (0x0039, 0x0E06), (0x3FFD, 0x3FDE)
# What rich text is packed after, as if it stood there; bytes of a head; and how far back it refers.
_COMMON = (
    rb"{\rtf1\ansi\mac\deff0\deftab720{\fonttbl;}{\f0\fnil \froman \fswiss \fmodern \fscript "
    rb"\fdecor MS Sans SerifSymbolArialTimes New RomanCourier{\colortbl\red0\green0\blue0"
    b"\r\n"
    rb"\par \pard\plain\f0\fs20\b\i\u\tab\tx"
)
_HEAD, _WINDOW = 16, 4096
_ENCODINGS = {65001: "utf-8", 20127: "ascii", 28591: "latin-1"}


def outlook_text(data: bytes, tracker: Tracker) -> str:
    """The text of a message and of those attached to it, as of `mail_text`.

    Raises:
        ContextError: it is longer than could fit.
    """
    from olefile import OleFileIO

    with OleFileIO(io.BytesIO(data)) as file:
        return "\n\n".join(_Folder(file, (), tracker).texts())


class _Folder:
    """A message, or what is attached to one."""

    def __init__(self, file: Any, path: tuple[str, ...], tracker: Tracker) -> None:
        self._file, self._path, self._tracker = file, path, tracker
        rows = self._stream("__properties_version1.0")[24 if path else 32 :]
        pairs = struct.iter_unpack("<2xH4xQ", rows[: len(rows) // 16 * 16])
        self._numbers = dict[int, int](pairs)

    def texts(self) -> Iterator[str]:
        """A message's head and body, and those of messages attached to it."""
        address = next((each for each in map(self._string, _ADDRESSES) if "@" in each), "")
        sent = next((self._numbers[each] for each in _SENT if each in self._numbers), 0)
        date = datetime(1601, 1, 1, tzinfo=UTC) + timedelta(microseconds=sent // 10)
        head = {
            "From": f"{self._string(_SENDER)} <{address}>".replace(" <>", ""),
            "To": self._string(_RECIPIENTS),
            "Cc": self._string(_COPIED),
            "Date": f"{date:%Y-%m-%d %H:%M UTC}" if sent else "",
            "Subject": self._string(_SUBJECT),
        }
        yield "\n".join(f"{name}: {value}" for name, value in head.items() if value)
        if body := self._body().strip():
            yield body
        folders = (tuple(each[: len(self._path) + 1]) for each in self._file.listdir())
        for folder in dict.fromkeys(folders):
            if folder[-1].startswith("__attach") and folder[:-1] == self._path:
                yield from _Folder(self._file, folder, self._tracker)._attached()

    def _attached(self) -> Iterator[str]:
        if self._file.exists([*self._path, _MESSAGE]):
            yield from _Folder(self._file, (*self._path, _MESSAGE), self._tracker).texts()
            return
        name = next(filter(None, map(self._string, _NAMES)), "without a name")
        self._tracker.not_read[f"attached file ({name})"] += 1

    def _body(self) -> str:
        text, page = self._string(_BODY), self._stream(f"__substg1.0_{_PAGE}0102")
        if text.strip():
            return text
        if page := page or self._string(_PAGE).encode():
            return html_page(page, self._tracker, self._encoding)
        rich = self._stream(f"__substg1.0_{_RICH_TEXT}0102")
        return rtf_text(unpacked_rich_text(rich), self._tracker) if rich else ""

    def _string(self, number: str) -> str:
        """A property that is text, in UTF-16 or the code page of the message."""
        wide = self._stream(f"__substg1.0_{number}001F")
        if wide:
            return wide.decode("utf-16-le", "replace").rstrip("\0")
        narrow = self._stream(f"__substg1.0_{number}001E").rstrip(b"\0")
        return decoded(narrow, self._tracker, self._encoding)

    @property
    def _encoding(self) -> str:
        page = next((self._numbers[each] for each in _CODE_PAGES if each in self._numbers), 0)
        return _ENCODINGS.get(page & 0xFFFFFFFF, f"cp{page & 0xFFFFFFFF}")

    def _stream(self, name: str) -> bytes:
        path = [*self._path, name]
        return bytes(self._file.openstream(path).read()) if self._file.exists(path) else b""


def unpacked_rich_text(data: bytes) -> bytes:
    """A body in rich text, as Outlook packs it (MS-OXRTFCP); what is there of one cut short."""
    if data[8:12] == b"MELA":
        return data[_HEAD:]
    out, rest = bytearray(_COMMON), memoryview(data)[_HEAD:]
    while rest:
        flags, rest = rest[0], rest[1:]
        for bit in range(8):
            if not flags >> bit & 1:
                out += rest[:1]
                rest = rest[1:]
                continue
            pair, whole, rest = int.from_bytes(rest[:2], "big"), len(rest) > 1, rest[2:]
            back = (len(out) - (pair >> 4)) % _WINDOW
            if not (back and whole):  # the end
                return bytes(out[len(_COMMON) :])
            for _ in range((pair & 15) + 2):
                out.append(out[-back])
    return bytes(out[len(_COMMON) :])
