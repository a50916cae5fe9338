"""Numbers and bytes as people write them."""

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
    """Parse a finite number, with underscores between digits as in TOML; None if it is none."""
    pattern = _WHOLE if whole else _REAL
    if pattern.fullmatch(text.strip()) is None:
        return None
    number = int(text) if whole else float(text)
    return number if isfinite(number) else None


def parse_bytes(text: str) -> int | None:
    """Parse a size such as `8GiB` or `500 MB` into bytes; None if it is none."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]+)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        return None
    return int(float(match[1]) * UNITS[match[2].upper()])


def size_or_auto(flag: str, text: str, examples: str, least: int = 0) -> int | None:
    """Parse a setting that is a size of at least `least` bytes, or `auto`, which gives None.

    Raises:
        SettingError: it is neither; the message gives the flag and `examples` of sizes.
    """
    if text == "auto":
        return None
    size = parse_bytes(text)
    if size is None or size < least:
        raise SettingError(f"{flag} {text!r} is not a size: give {examples} or auto")
    return size


def readable(count: float) -> str:
    """Bytes for people: `24.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
