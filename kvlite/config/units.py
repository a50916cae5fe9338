"""Bytes as people write them."""

import re
from math import isfinite

from kvlite.errors import SettingError

UNITS = {"B": 1, "BYTES": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

_WHOLE = re.compile("[+-]?[0-9](_?[0-9]){0,29}")
_REAL = re.compile(
    r"[+-]?([0-9](_?[0-9]){0,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,9})?"
)


def parse_number(text: str, *, whole: bool) -> int | float | None:
    """A number in the digits 0 to 9, which underscores may set apart, as in TOML; None if it is no
    such thing, or not finite."""
    pattern = _WHOLE if whole else _REAL
    if pattern.fullmatch(text.strip()) is None:
        return None
    number = int(text) if whole else float(text)
    return number if isfinite(number) else None


def parse_bytes(text: str) -> int | None:
    """The bytes of `8GiB` or `500 MB`; None if it is no such thing."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]+)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        return None
    return int(float(match[1]) * UNITS[match[2].upper()])


def size_or_auto(flag: str, text: str, examples: str, least: int = 0) -> int | None:
    """The bytes that a setting gives, None for auto.

    Args:
        flag: what users call it.
        examples: of sizes, for the error.

    Raises:
        SettingError: it is no size, or less than `least`.
    """
    if text == "auto":
        return None
    size = parse_bytes(text)
    if size is None or size < least:
        raise SettingError(f"{flag} {text!r} is not a size: give {examples} or auto")
    return size


def readable(count: float) -> str:
    """Bytes as people write them: `24.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
