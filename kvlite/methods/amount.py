"""How much a user wants to keep: entries, a share of what was read, or bytes."""

import re
from dataclasses import dataclass
from math import ceil

from kvlite.errors import SettingError
from kvlite.methods import Method, parse_method
from kvlite.methods.rules import ROOM
from kvlite.model.shape import ModelShape

AUTO_SHARE, AUTO_LEAST = 0.25, 1024

_UNITS = {"B": 1, "BYTES": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20}
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

    def resolve(
        self, shape: ModelShape, method: Method, seen: int, longest: int, itemsize: int
    ) -> int:
        """Mean entries a KV head and layer for an answer.

        Args:
            seen: tokens read before it.
            longest: tokens the answer may have, which methods that are not bounded add to what
                they keep.

        Raises:
            SettingError: the bytes hold too little, or the method does not keep to a size.
        """
        if self.entries is not None:
            return self.entries
        if self.share is not None:
            everything = longest if self.share == 1 else 0
            return max(self.least, method.least_budget, int(self.share * seen + 1e-9) + everything)
        assert self.nbytes is not None
        if not method.keeps_to_budget:
            raise SettingError(
                f"--budget {self.nbytes} bytes cannot be kept by {method.spec}, whose lines vary "
                "in length: give a number of entries"
            )
        entry = shape.kv_heads * (shape.entry_bytes(itemsize) + 4 * method.decode_rows)
        grown = 0 if method.bounded else longest + ROOM
        most = seen + longest + ROOM
        sliding = sum(min(window, most) for window in shape.windows if window is not None)
        sliding *= shape.kv_heads * shape.entry_bytes(itemsize)
        layers = max(1, len(shape.full_layers))
        entries = (self.nbytes - sliding) // (layers * entry) - grown
        needed = min(method.least_budget, seen)
        if entries < needed:
            least = sliding + (needed + grown) * layers * entry
            raise SettingError(
                f"--budget {self.nbytes} bytes is too little for {method.spec} with this model "
                f"and {longest} new tokens: give at least {least} bytes"
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
    match = re.fullmatch(r"([+-]?\d{1,18}(?:\.\d{1,18})?)\s*(%|bytes|[kKmMgG]?[iI]?[bB])?", written)
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
        raise SettingError(
            f"--budget {written!r} is not a whole number of entries: give {ceil(number)}, or a "
            "share such as 25%"
        )
    return Amount(entries=int(number))


def method_and_amount(method: str, budget: str | int) -> tuple[Method, Amount]:
    """The method and the budget a user wrote.

    Raises:
        SettingError: one of them is none, or they do not fit each other.
    """
    chosen, amount = parse_method(method), parse_amount(budget)
    if amount.entries is not None:
        chosen.check(amount.entries)
    return chosen, amount
