"""Settings as they are typed in a chat."""

import dataclasses
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from kvlite.errors import SettingError
from kvlite.settings import Settings

OPTIONS = {option.name: option for option in dataclasses.fields(Settings)}

_NONE = "none"
_SWITCH = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


# By type: how it is read, and what is expected.
_KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, "text"),
    bool: (lambda text: _SWITCH[text.lower()], "true or false"),
    int: (_whole, "a whole number"),
    int | None: (lambda text: None if text == _NONE else _whole(text), "a whole number, or none"),
    float: (float, "a number"),
    tuple[str, ...]: (
        lambda text: () if text == _NONE else tuple(shlex.split(text)),
        "text with every quotation mark closed",
    ),
}


def shown_name(name: str) -> str:
    """As a user types it: the flag without its dashes."""
    flag: str = OPTIONS[name].metadata["flag"] or name.replace("_", "-")
    return flag.removeprefix("--")


def option_named(typed: str) -> str:
    """The setting's name, from that, or from the flag.

    Raises:
        SettingError: there is none.
    """
    wanted = typed.removeprefix("--").replace("_", "-").lower()
    names = {name.replace("_", "-"): name for name in OPTIONS}
    names |= {shown_name(name): name for name in OPTIONS}
    if wanted in names:
        return names[wanted]
    close = get_close_matches(wanted, names, 1)
    near = f": did you mean {close[0]}?" if close else ": /set lists them all"
    raise SettingError(f"there is no setting {typed!r}{near}")


def value_typed(name: str, text: str) -> Any:
    """A value as the setting's type has it; its range is checked when it is used.

    Raises:
        SettingError: it is none of that type.
    """
    read, expected = _KINDS[OPTIONS[name].type]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise SettingError(f"{shown_name(name)} {text!r} is not {expected}") from None


def written(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return shlex.join(value) or _NONE
    return _NONE if value is None or value == "" else str(value)
