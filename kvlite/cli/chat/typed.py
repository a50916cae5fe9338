"""What is typed in a chat: a message, several lines, a command, a setting and its value."""

import json
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvlite.config.environment import read_text
from kvlite.config.settings import OPTIONS, flag_of
from kvlite.errors import SettingError

QUOTES = '"""'
_NONE = "none"


def unfinished(text: str) -> bool:
    """Whether the text opens with three quotation marks that are not closed yet."""
    text = text.strip()
    return text.startswith(QUOTES) and not _closed(text)


def unquoted(text: str) -> str:
    """The text without the three quotation marks around it, if there are any."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and _closed(stripped):
        return stripped[3:-3].strip("\n")
    return text


def _closed(text: str) -> bool:
    return len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES)


def command_in(text: str) -> tuple[str, str] | None:
    """A command's name and what follows it; None for a message.

    A command is a slash and letters at the very beginning: `/etc/hosts` is a message, and so is
    anything after a space.
    """
    first, _, rest = text.partition(" ")
    name = first[1:].rstrip("\n")
    if not first.startswith("/") or not name.isalpha() or "\n" in text.strip():
        return None
    return name.lower(), rest.strip()


def shown_name(name: str) -> str:
    """A setting as users type it: its flag without the dashes."""
    return flag_of(name).removeprefix("--")


def option_named(typed: str) -> str:
    """The setting that was typed, as a flag or as in Python; raises SettingError if none."""
    wanted = typed.removeprefix("--").replace("_", "-").lower()
    names = {name.replace("_", "-"): name for name in OPTIONS}
    names |= {shown_name(name): name for name in OPTIONS}
    if wanted in names:
        return names[wanted]
    close = get_close_matches(wanted, names, 1)
    near = f": did you mean {close[0]}?" if close else ": /set lists them all"
    raise SettingError(f"there is no setting {typed!r}{near}")


def value_typed(name: str, text: str) -> Any:
    """A setting's value, written as in an environment variable, or `none` where it may be empty.
    Raises SettingError if the text has the wrong type or is out of range."""
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


def explained(name: str) -> str:
    """What a setting means, and which values it may have."""
    about = OPTIONS[name].metadata
    choices, low, high = about["choices"], about["low"], about["high"]
    said: str = about["help"]
    if choices:
        said += f" ({', '.join(choices)})"
    if low is not None:
        said += f" (from {low:g} on)" if high is None else f" ({low:g} to {high:g})"
    return said


def files(argument: str) -> list[str]:
    """File names: one with spaces as it is, or several, quoted where they have some. Raises
    SettingError if there is none, or a quotation mark is not closed."""
    if argument and Path(argument).expanduser().is_file():
        return [str(Path(argument).expanduser())]
    try:
        paths = shlex.split(argument)
    except ValueError:
        raise SettingError(f"{argument}: a quotation mark is not closed") from None
    if not paths:
        raise SettingError("name a file: /read report.pdf")
    if "-" in paths:
        raise SettingError("standard input is what you type: name a file")
    return [str(Path(path).expanduser()) for path in paths]


def number(argument: str) -> int | None:
    """A number from 1 on, None if nothing was typed; raises SettingError for other things."""
    if not argument:
        return None
    if not argument.isascii() or not argument.isdecimal() or len(argument) > 9:
        raise SettingError(f"{argument!r} is not a number: count from 1")
    return int(argument)
