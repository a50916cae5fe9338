"""Checks of what Python callers give."""

import os
import reprlib
from numbers import Integral
from pathlib import Path
from typing import Any

from kvlite.errors import SettingError, SnapshotError


def require_text(text: object) -> None:
    """Raises SettingError unless a message is text."""
    if not isinstance(text, str):
        raise SettingError(f"{reprlib.repr(text)} is not text: say something in a string")


def require_callable(callback: object, name: str) -> None:
    """Raises SettingError unless a callback is callable or None."""
    if callback is not None and not callable(callback):
        raise SettingError(f"{name} {callback!r} cannot be called: give a function, or None")


def whole_number(number: Any) -> int | None:
    """Any library's whole number as an int; None for anything else, bools included."""
    whole = isinstance(number, Integral) and not isinstance(number, bool)
    return int(number) if whole else None


def token_list(token_ids: Any) -> list[int]:
    """Token ids as a list of int.

    Raises:
        SettingError: they are no list, tuple or tensor of whole numbers.
    """
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if not isinstance(ids, list | tuple):
        wrong = type(token_ids).__name__
    elif all(type(token) is int for token in ids):
        return list(ids)
    else:
        found = [whole_number(token) for token in ids]
        if None not in found:
            return [token for token in found if token is not None]
        wrong = f"a list with {reprlib.repr(ids[found.index(None)])} in it"
    raise SettingError(
        f"{wrong} is not a list of token ids: encode text with runner.tokenizer.encode, or say it "
        "with stream"
    )


def path_of(name: object) -> Path:
    """A file's path.

    Raises:
        SnapshotError: `name` cannot be one.
    """
    if not isinstance(name, str | os.PathLike) or "\0" in str(name):
        raise SnapshotError(f"{name!r} is no file's name: give a .kv file's path, as text")
    return Path(name)
