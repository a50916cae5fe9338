"""Messages (.eml): every part that a reader would see, in order."""

import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import suppress
from email import message_from_bytes, policy
from email.message import EmailMessage, MIMEPart
from quopri import decodestring

from kvlite.documents.html import html_text
from kvlite.documents.plain_text import declared_in, decoded
from kvlite.documents.rtf import rtf_text
from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

_SHOWN = ("From", "To", "Cc", "Date", "Subject")
# What is no text and no attached file either.
_NOT_READ = {
    "multipart/encrypted": "encrypted part",
    "application/pkcs7-mime": "encrypted or signed part",
    "application/x-pkcs7-mime": "encrypted or signed part",
    "application/pkcs7-signature": "signature",
    "application/x-pkcs7-signature": "signature",
    "application/pgp-signature": "signature",
    "message/external-body": "external part",
    "message/partial": "partial message",
}
_ENCODED: dict[str, Callable[[bytes], bytes]] = {
    "base64": b64decode,
    "quoted-printable": decodestring,
}
_EVENTS = re.compile(r"(?ms)^BEGIN:V(EVENT|TODO)$(.*?)^(?:END|BEGIN):")
_CALLED = {
    "SUMMARY": "Event", "DTSTART": "Begins", "DTEND": "Ends", "DUE": "Due", "LOCATION": "Place",
    "DESCRIPTION": "Description",
}  # fmt: skip
_SAID = re.compile(rf"(?m)^({'|'.join(_CALLED)})(?:;TZID=([^:;]+))?(?:;[^:\n]*)?:(.+)$")
_DATE = re.compile(r"^(\d{4})(\d\d)(\d\d)(?:T(\d\d)(\d\d)\d\d)?(?=Z?$)")
# A page that is so many times as long as the plain text beside it is not that text again.
_MORE = 4


def mail_text(data: bytes, tracker: Tracker) -> str:
    """The text of a message and of those forwarded in it, each under its sender, recipients, date
    and subject.

    Raises:
        ContextError: it is longer than could fit.
    """
    return _message(_parsed(data), tracker)


def _parsed(data: bytes) -> EmailMessage:
    return message_from_bytes(data, _class=EmailMessage, policy=policy.default)


def _message(message: MIMEPart, tracker: Tracker) -> str:
    head = "\n".join(
        f"{name}: {_header(message, name, tracker)}" for name in _SHOWN if message[name]
    )
    texts = (text.strip() for text in _texts(message, tracker))
    return "\n\n".join(filter(None, (head, *texts)))


def _header(message: MIMEPart, name: str, tracker: Tracker) -> str:
    """What a header says; old programs write bytes of an encoding that nothing names."""
    raw = next(value for key, value in message.raw_items() if key.casefold() == name.casefold())
    data = str(raw).encode("utf-8", "surrogateescape")
    if not data.isascii():
        with suppress(DocumentError):  # bytes that are no text
            return " ".join(decoded(data, tracker).split())
    return str(message[name])


def _forwarded(part: MIMEPart) -> list[MIMEPart]:
    """The messages in a part. None should be encoded as a whole, and some are."""
    encoding = str(part["Content-Transfer-Encoding"] or "").strip().casefold()
    if encoding in _ENCODED:
        body = part.as_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")[2]
        with suppress(ValueError):  # it is not encoded
            return [_parsed(_ENCODED[encoding](body))]
    return [*part.iter_parts()]


def _texts(part: MIMEPart, tracker: Tracker) -> Iterator[str]:
    """The text of each part in a part."""
    kind = part.get_content_type()
    if kind in _NOT_READ or not part.is_multipart():
        yield _text(part, tracker)
    elif kind == "message/delivery-status":
        yield "\n\n".join(str(each).strip() for each in part.iter_parts())
    elif part.get_content_maintype() == "message":
        yield from (_message(each, tracker) for each in _forwarded(part))
    elif kind == "multipart/alternative":
        yield from _preferred([*part.iter_parts()], tracker)
    else:
        before = tracker.not_read["picture"]
        for each in part.iter_parts():
            # Pictures that a page shows are counted with it.
            counted = each["Content-ID"] and tracker.not_read["picture"] > before
            if not (counted and _is_picture(each)):
                yield from _texts(each, tracker)


def _preferred(parts: list[MIMEPart], tracker: Tracker) -> Iterator[str]:
    """The first that has text, plain text before a page unless it only says that there is one; of
    the others, what is no text."""
    plain = _size(parts, "text/plain", tracker)
    is_hint = _MORE * plain < _size(parts, "text/html", tracker)
    order = {"text/plain": 2 * is_hint, "text/calendar": 3}
    chosen = False
    for part in sorted(parts, key=lambda each: order.get(each.get_content_type(), 1)):
        if not chosen:
            texts = [*_texts(part, tracker)]
            chosen = any(text.strip() for text in texts)
            yield from texts
        else:
            for each in part.walk():
                other = each.get_content_type() == "text/calendar" or not _is_text(each)
                if other and not each.is_multipart():
                    yield _text(each, tracker)


def _size(parts: list[MIMEPart], kind: str, tracker: Tracker) -> int:
    """How many characters parts of a kind have."""
    trial = Tracker(tracker.label, encoding=tracker.encoding)
    inner = (each for part in parts for each in part.walk() if each.get_content_type() == kind)
    return sum(len(_text(each, trial).strip()) for each in inner if not each.is_attachment())


def _text(part: MIMEPart, tracker: Tracker) -> str:
    """The text of a part without parts; what has none is noted."""
    kind, data = part.get_content_type(), part.get_payload(decode=True)
    if _is_text(part) and isinstance(data, bytes):
        with suppress(DocumentError):  # binary data, which is noted
            charset = part.get_content_charset() or ""
            if kind == "text/html":
                return html_text(decoded(data, tracker, charset or declared_in(data)), tracker)
            if kind in ("text/rtf", "text/richtext") and data.lstrip().startswith(b"{\\rtf"):
                return rtf_text(data.lstrip(), tracker)
            text = decoded(data, tracker, charset)
            return _events(text) if kind == "text/calendar" else text
    what = _NOT_READ.get(kind) or ("picture" if _is_picture(part) else "attached file")
    tracker.not_read[f"{what} ({' '.join((part.get_filename() or kind).split())})"] += 1
    return ""


def _is_text(part: MIMEPart) -> bool:
    return part.get_content_maintype() in ("text", "multipart") and not part.is_attachment()


def _is_picture(part: MIMEPart) -> bool:
    return part.get_content_maintype() == "image"


def _events(calendar: str) -> str:
    """What happens or is to be done, when and where; the calendar as it is if that is nothing."""
    made = list[str]()
    for kind, event in _EVENTS.findall(re.sub(r"\n[ \t]", "", calendar.replace("\r", ""))):
        lines = list[str]()
        for name, zone, value in _SAID.findall(event):
            called = "Task" if (kind, name) == ("TODO", "SUMMARY") else _CALLED[name]
            date = _DATE.sub(r"\1-\2-\3 \4:\5", value).replace(" :", "")
            text = re.sub(r"\\([,;\\])", r"\1", re.sub(r"\\[nN]", " ", date))
            lines.append(f"{called}: {text} {zone}".strip())
        made.append("\n".join(lines))
    return "\n\n".join(made) or calendar
