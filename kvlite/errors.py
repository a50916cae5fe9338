"""What can go wrong, in sentences for people.

Every error a user can cause is a `KvliteError` whose message names the value and the remedy;
front ends print it as it is and exit with code 2.
"""


class KvliteError(Exception):
    """Something the user asked for cannot be done; the message says what and what to do."""


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
    """Someone asked to stop while a prompt was read; nothing of it was."""

    def __init__(self) -> None:
        super().__init__("stopped while reading: nothing of it was read")


class InterruptedCacheError(KvliteError):
    """A cache was left half written by an interrupted step and must not be used further."""


def reason(error: Exception) -> str:
    """What a library's error says, in its first line."""
    first = str(error).strip().partition("\n")[0].rstrip(" .:")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
