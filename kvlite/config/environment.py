"""Settings from environment variables: `KVLITE_KV_BITS` is `kv_bits`, and so on."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from kvlite.config.checked_file import Damaged, from_toml
from kvlite.config.settings import OPTIONS, checked
from kvlite.config.units import parse_number
from kvlite.errors import SettingError

PREFIX = "KVLITE_"
PROFILE = "KVLITE_PROFILE"
# Variables that are not settings: folders, logins to the app, the profile.
OTHERS = (
    *("KVLITE_API_KEY", "KVLITE_AUTH", "KVLITE_CACHE", "KVLITE_CONFIG", "KVLITE_DATA"),
    "KVLITE_MODELS",
    "KVLITE_SERVER",
    PROFILE,
)

_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def unknown_variables(variables: Iterable[str]) -> list[str]:
    """The variables that begin like a setting's but belong to none."""
    return sorted(each for each in variables if each.startswith(PREFIX) and each not in _known())


def about_unknown(variable: str) -> str:
    """What to tell whoever set a variable that belongs to nothing, with the one it may be."""
    names = [each.removeprefix(PREFIX) for each in _known()]
    near = get_close_matches(variable.removeprefix(PREFIX)[:40], names, 1, cutoff=0.75)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else "`kvlite config` has all settings"
    return f"{variable[:80]} is not a setting and changes nothing: {hint}"


def _known() -> list[str]:
    return [*map(variable_of, OPTIONS), *OTHERS]


def read_text(name: str, text: str, called: str) -> Any:
    """Parse a setting's value from text, as in an environment variable.

    `stop` is one text or, if it begins with a bracket, a TOML list of texts.

    Args:
        called: what the value is called in errors.

    Raises:
        SettingError: the text has the wrong type or is out of range.
    """
    option = OPTIONS[name]
    value: Any = text
    if option.type is bool:
        value = _WORDS.get(text.strip().lower())
        if value is None:
            raise SettingError(f"{called} {text!r} is not true or false")
    elif isinstance(option.default, tuple):
        value = _list_of_texts(text, called) if text.lstrip().startswith("[") else (text,)
    elif option.type is not str:
        whole = option.type is not float
        value = parse_number(text, whole=whole)
        if value is None:
            raise SettingError(f"{called} {text!r} is not a {'whole ' if whole else ''}number")
    return checked(name, value, called)


def _list_of_texts(text: str, called: str) -> Any:
    try:
        found = from_toml(f"texts = {text}".encode("utf-8", "surrogatepass"))
    except Damaged:
        found = {}
    if found.keys() != {"texts"}:
        raise SettingError(
            f"{called} {text!r} begins with a bracket and is no list: write texts in quotes, as in "
            '["END", "[INST]"]'
        )
    return found["texts"]
