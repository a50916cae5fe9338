"""What can go wrong, in sentences for people.

Every error a user can cause is a `KvliteError` whose message names the value and the remedy;
front ends print it as it is and exit with code 2.
"""

from threading import Event

from kvlite.printable import harmless

# Characters of a message, so that a name of a megabyte does not bury what is wrong with it.
LONGEST = 600


class KvliteError(Exception):
    """Something the user asked for cannot be done; the message says what and what to do, in one
    line that is not long, whatever the values are that it names."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """A message in one line, of one that is too long the beginning and the end: the value it names,
    and the remedy."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    return harmless(" ".join(message.splitlines()))


def sentence(error: Exception) -> str:
    """An error as front ends print it: its message, and in brackets what was noted of it."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{error} ({notes})" if notes else str(error)


class DocumentError(KvliteError):
    """A file cannot be read as a document."""


class ModelError(KvliteError):
    """A model cannot be found, opened, or run by this engine."""


class SettingError(KvliteError):
    """A setting has an unknown name or a value out of its range."""


class ContextError(KvliteError):
    """What should be read is longer than the model was trained for."""


class CapacityError(KvliteError):
    """A cache would be written past its end; torch itself drops such a write without a word."""


class RecallError(KvliteError):
    """There is no room for what should be recalled later; without recall everything goes on."""


class SnapshotError(KvliteError):
    """A conversation cannot be saved, or a saved one cannot be opened; the file is as it was."""


class OutOfMemory(KvliteError):
    """Memory ran out, and nothing is left to give up that would help; the conversation is kept."""


class ForecastError(KvliteError):
    """What a turn would take cannot be told; it can go on without a plan."""


class Stopped(KvliteError):
    """Someone asked to stop before something was done; all is as it was before."""

    def __init__(self) -> None:
        super().__init__("stopped before it was done: nothing has changed")


def require_uncancelled(cancel: Event | None) -> None:
    """Raises Stopped if `cancel` was set; between two stages of work."""
    if cancel is not None and cancel.is_set():
        raise Stopped


class InterruptedCacheError(KvliteError):
    """A cache was left half written by an interrupted step and must not be used further."""


def reason(error: Exception) -> str:
    """What a library's error says, in its first line."""
    first = str(error).strip().partition("\n")[0].rstrip(" .:")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
