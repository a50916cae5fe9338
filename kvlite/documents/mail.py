"""Messages (.eml)."""

from email import message_from_bytes, policy
from email.message import EmailMessage, MIMEPart

from kvlite.documents.html import html_text
from kvlite.documents.tracker import Tracker

_SHOWN = ("From", "To", "Cc", "Date", "Subject")


def mail_text(data: bytes, tracker: Tracker) -> str:
    """The text of a message under its sender, recipients, date and subject. Attached files are
    counted.

    Raises:
        ContextError: it is longer than could fit.
    """
    message = message_from_bytes(data, _class=EmailMessage, policy=policy.default)
    head = [f"{name}: {message[name]}" for name in _SHOWN if message[name]]
    body = message.get_body(("plain", "html"))
    text = "" if body is None else _text(body)
    if body is not None and body.get_content_type() == "text/html":
        text = html_text(text, tracker)
    tracker.not_read["attached file"] += sum(1 for _ in message.iter_attachments())
    return "\n".join(head) + "\n\n" + text.strip()


def _text(body: MIMEPart) -> str:
    """A body in the encoding that it names, or as what it most likely is."""
    try:
        return str(body.get_content())
    except LookupError:
        from charset_normalizer import from_bytes

        data = body.get_payload(decode=True)
        return str(from_bytes(data).best() or "") if isinstance(data, bytes) else ""
