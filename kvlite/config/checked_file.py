"""What files hold, read without trusting it: whatever is wrong with it is one error, `Damaged`.

All JSON and TOML of files is parsed here, and used within `sound` until it has been checked.
"""

import json
import logging
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvlite.errors import reason
from kvlite.printable import harmless

_T = TypeVar("_T")
# What malformed values raise where they are parsed or used. Errors with a sentence pass.
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
# Later than any time that can be written as a date.
_NEVER = 250_000_000_000


class Damaged(ValueError):
    """What a file holds is not what belongs there; says what is wrong, in a few words."""


class PassedOver:
    """Says of files that are passed over what is wrong with them, once of each."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._named = log, set[Path]()

    def __call__(self, path: Path, why: Exception) -> None:
        """Say it of a file."""
        if path not in self._named:
            self._named.add(path)
            self._log.warning("%s is passed over, as it is damaged: %s", harmless(str(path)), why)


@contextmanager
def sound(error: Callable[[str], Exception] = Damaged) -> Iterator[None]:
    """Turn all that malformed values raise into one error, made from what is wrong."""
    try:
        yield
    except _WRONG as wrong:
        raise error(_said(wrong)) from wrong


def from_json(text: str | bytes, **hooks: Any) -> Any:
    """What a JSON text says; `hooks` are of `json.loads`. Raises Damaged."""
    with sound():
        return json.loads(text, **hooks)


def tuples(value: Any) -> Any:
    """What was parsed, with tuples instead of lists."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def from_toml(text: bytes) -> dict[str, Any]:
    """What a TOML text in UTF-8 says. Raises Damaged."""
    with sound():
        return tomllib.loads(text.decode("utf-8-sig"))


def of_type(kind: type[_T], value: Any) -> _T:
    """A value, if it is of a type, and a number that is neither negative nor beyond any date or
    size; raises Damaged."""
    found: Any = float(value) if kind is float and type(value) is int else value
    number = found if isinstance(found, int | float) else 0
    if type(found) is not kind or not 0 <= number < _NEVER:
        raise Damaged(f"a value that should be {kind.__name__} is another")
    return found


def _said(wrong: Exception) -> str:
    if isinstance(wrong, RecursionError):
        return "it is nested too deeply"
    if "set_int_max_str_digits" in str(wrong):
        return "it has a number of thousands of digits"
    if isinstance(wrong, Damaged | json.JSONDecodeError | tomllib.TOMLDecodeError | UnicodeError):
        return " ".join(str(wrong).split())
    return reason(wrong)
