"""What is typed: a message, a command, or the beginning of several lines."""

QUOTES = '"""'


def unfinished(text: str) -> bool:
    """Whether several lines were begun with three quotation marks and not ended by them."""
    text = text.strip()
    return text.startswith(QUOTES) and not _closed(text)


def unquoted(text: str) -> str:
    """Several lines without the quotation marks around them; anything else as it is."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and _closed(stripped):
        return stripped[3:-3].strip("\n")
    return text


def _closed(text: str) -> bool:
    return len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES)


def command_in(text: str) -> tuple[str, str] | None:
    """A command's name and what follows it; None for a message.

    A command is a slash and letters at the very beginning: `/etc/hosts` is none, and a space before
    the slash makes anything a message.
    """
    first, _, rest = text.partition(" ")
    name = first[1:].rstrip("\n")
    if not first.startswith("/") or not name.isalpha() or "\n" in text.strip():
        return None
    return name.lower(), rest.strip()
