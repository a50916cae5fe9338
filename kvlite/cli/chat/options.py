"""Settings as they are typed in a chat."""

import json
from difflib import get_close_matches
from typing import Any

from kvlite.config.environment import read_text
from kvlite.config.settings import OPTIONS, flag_of
from kvlite.errors import SettingError

_NONE = "none"


def shown_name(name: str) -> str:
    """As a user types it: the flag without its dashes."""
    return flag_of(name).removeprefix("--")


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
    """A setting's value: as a variable of the environment has it, and none for nothing.

    Raises:
        SettingError: it is of another type, or out of range.
    """
    default = OPTIONS[name].default
    if text == _NONE and default in (None, (), ""):
        return default
    return read_text(name, text, shown_name(name))


def written(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False) if value else _NONE
    return _NONE if value is None or value == "" else str(value)
