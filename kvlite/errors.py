"""Errors that users can cause: each message names the value and the remedy.

Front ends print them as they are and exit with code 2.
"""

from threading import Event

from kvlite.printable import harmless

# Characters of a message: a name of a megabyte must not bury what is wrong with it.
LONGEST = 600


class KvliteError(Exception):
    """Something the user asked for cannot be done; the message is one short line, whatever the
    values it names."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """A message in one line; if it is too long, its beginning (the value) and its end (the
    remedy)."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    return harmless(" ".join(message.splitlines()))


def sentence(error: Exception) -> str:
    """An error as front ends print it: its message, and its notes in brackets."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{error} ({notes})" if notes else str(error)


class DocumentError(KvliteError):
    """A file cannot be read as a document."""


class ModelError(KvliteError):
    """A model cannot be found, opened, or run by this engine."""


class ChatTemplateError(ModelError):
    """A model's chat template fails, or refuses what is said."""


class SettingError(KvliteError):
    """A setting has an unknown name or a value out of its range."""


class ContextError(KvliteError):
    """The text to read is longer than the model's trained context; `tokens` is about how many it
    has with all before it, if that is known."""

    def __init__(self, said: str, tokens: int | None = None) -> None:
        super().__init__(said)
        self.tokens = tokens


class CapacityError(KvliteError):
    """A cache would be written past its end, which torch would silently ignore."""


class RecallError(KvliteError):
    """There is no room for the recall store; without recall everything goes on."""


class SnapshotError(KvliteError):
    """A conversation cannot be saved or opened; the file is as it was."""


class OutOfMemory(KvliteError):
    """Memory ran out and nothing is left to give up; the conversation is kept."""


class ForecastError(KvliteError):
    """A turn's memory cannot be forecast; it can go on without a plan."""


class Stopped(KvliteError):
    """The user asked to stop before something was done; nothing has changed."""

    def __init__(self) -> None:
        super().__init__("stopped before it was done: nothing has changed")


def require_uncancelled(cancel: Event | None) -> None:
    """Raises Stopped if `cancel` is set."""
    if cancel is not None and cancel.is_set():
        raise Stopped


class InterruptedCacheError(KvliteError):
    """An interrupted step left the cache half written: it must not be used any more."""


def reason(error: Exception) -> str:
    """A library's error: its type and the first line of its message."""
    first = str(error).strip().partition("\n")[0].rstrip(" .:")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
