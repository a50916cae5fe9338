"""How much a user wants to keep: entries, a share of what was read, or bytes."""

import re
from dataclasses import dataclass

from kvlite.errors import SettingError
from kvlite.methods.base import Method
from kvlite.model.shape import ModelShape

AUTO_SHARE, AUTO_LEAST = 0.25, 1024

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20}
_UNITS["GIB"] = 1 << 30


@dataclass(frozen=True)
class Amount:
    """A budget as it was asked for; exactly one of the three is set.

    Attributes:
        entries: entries a KV head and layer.
        share: part of the tokens read, above 0 and at most 1.
        nbytes: bytes of all layers.
        least: entries a share never goes below.
    """

    entries: int | None = None
    share: float | None = None
    nbytes: int | None = None
    least: int = 1

    def resolve(self, shape: ModelShape, method: Method, seen: int, itemsize: int) -> int:
        """Mean entries a KV head and layer, once `seen` tokens are read.

        Raises:
            SettingError: the bytes hold not a single entry.
        """
        if self.entries is not None:
            return self.entries
        if self.share is not None:
            return max(self.least, int(self.share * seen + 1e-9))
        assert self.nbytes is not None
        entry = shape.kv_heads * (shape.entry_bytes(itemsize) + 4 * method.decode_rows)
        sliding = sum(min(window, seen) for window in shape.windows if window is not None)
        sliding *= shape.kv_heads * shape.entry_bytes(itemsize)
        layers = max(1, len(shape.full_layers))
        entries = (self.nbytes - sliding) // (layers * entry)
        if entries < 1:
            least = sliding + layers * entry
            raise SettingError(
                f"--budget {self.nbytes} bytes holds no entry of this model: "
                f"one in every layer takes {least} bytes"
            )
        return entries


def parse_amount(text: str | int) -> Amount:
    """A budget from what a user wrote: `512`, `25%`, `64MiB`, `auto`.

    Raises:
        SettingError: it is none of these, or not above zero.
    """
    written = str(text).strip()
    if written == "auto":
        return Amount(share=AUTO_SHARE, least=AUTO_LEAST)
    match = re.fullmatch(r"([+-]?\d{1,18}(?:\.\d{1,18})?)\s*(%|[kKmMgG]?[iI]?[bB])?", written)
    if match is None:
        raise SettingError(
            f"--budget {written!r} is not a budget: give entries (512), a share (25%), "
            "bytes (64MiB) or auto"
        )
    number, unit = float(match[1]), (match[2] or "").upper()
    if number <= 0:
        raise SettingError(f"--budget {written} keeps nothing: give more than 0")
    if unit == "%":
        if number > 100:
            raise SettingError(f"--budget {written} is more than everything: give up to 100%")
        return Amount(share=number / 100)
    if unit:
        if unit not in _UNITS:
            raise SettingError(f"--budget {written!r} has an unknown unit: use KiB, MiB or GiB")
        return Amount(nbytes=int(number * _UNITS[unit]))
    if number != int(number):
        raise SettingError(f"--budget {written!r} is not a whole number of entries")
    return Amount(entries=int(number))


def check_fit(method: Method, amount: Amount) -> None:
    """Raises SettingError if a number of entries was asked for that the method cannot work with."""
    if amount.entries is not None:
        method.check(amount.entries)
