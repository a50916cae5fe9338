"""Settings from environment variables: `KVLITE_KV_BITS` is `kv_bits`, and so on."""

import tomllib
from collections.abc import Iterable
from typing import Any

from kvlite.config.settings import OPTIONS, checked
from kvlite.config.units import parse_number
from kvlite.errors import SettingError

PREFIX = "KVLITE_"
PROFILE = "KVLITE_PROFILE"
# What variables of this name mean beside settings: folders, who may log in to the app, the profile.
OTHERS = ("KVLITE_AUTH", "KVLITE_CACHE", "KVLITE_CONFIG", "KVLITE_DATA", PROFILE)

_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def variable_of(name: str) -> str:
    """What a setting is called in the environment."""
    return PREFIX + name.upper()


def read_variable(name: str, text: str) -> Any:
    """A setting's value from what its variable says.

    Numbers and true or false are written as such. `stop` is one text, or several as a list in TOML:
    what begins with a bracket is such a list.

    Raises:
        SettingError: it is of another type, or out of range; the message names the variable.
    """
    return read_text(name, text, variable_of(name))


def read_text(name: str, text: str, called: str) -> Any:
    """A setting's value from text, as a variable has it.

    Args:
        called: what it is called where the text is from, for errors.

    Raises:
        SettingError: it is of another type, or out of range.
    """
    return checked(name, _parsed(name, text, called), called)


def unknown_variables(variables: Iterable[str]) -> list[str]:
    """Those that are named like a setting's, and are none's."""
    known = {*OTHERS, *map(variable_of, OPTIONS)}
    return sorted(each for each in variables if each.startswith(PREFIX) and each not in known)


def _parsed(name: str, text: str, called: str) -> Any:
    option = OPTIONS[name]
    if option.type is str:
        return text
    if option.type is bool:
        if text.strip().lower() not in _WORDS:
            raise SettingError(f"{called} {text!r} is not true or false")
        return _WORDS[text.strip().lower()]
    if isinstance(option.default, tuple):
        return _texts(text, called) if text.lstrip().startswith("[") else (text,)
    whole = option.type is not float
    number = parse_number(text, whole=whole)
    if number is None:
        raise SettingError(f"{called} {text!r} is not a {'whole ' if whole else ''}number")
    return number


def _texts(text: str, called: str) -> Any:
    """What a list in TOML holds."""
    try:
        found = tomllib.loads(f"texts = {text}")
    except (ValueError, RecursionError):
        found = {}
    if found.keys() != {"texts"}:
        raise SettingError(
            f"{called} {text!r} begins with a bracket and is no list: write texts in quotes, as in "
            '["END", "[INST]"]'
        )
    return found["texts"]
