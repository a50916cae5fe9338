"""How much to keep: entries, a share of what was read, or bytes."""

import re
from dataclasses import dataclass
from math import ceil

from kvlite.cache import KVBits, KVSize
from kvlite.config.units import UNITS
from kvlite.errors import SettingError
from kvlite.methods import Method, parse_method
from kvlite.methods.layer_policy import ROOM
from kvlite.model.shape import ModelShape

# How little `auto` keeps where memory is short: a share of what was read, and so many entries.
AUTO_SHARE, AUTO_LEAST = 1 / 16, 1024
# A smaller cache would hold nothing useful, however small a model's heads are.
LEAST_BYTES = 64


@dataclass(frozen=True)
class Budget:
    """A budget as a user asked for it; exactly one of the first three is set.

    Attributes:
        entries: entries a KV head and layer.
        share: part of the tokens read, above 0 and at most 1.
        nbytes: bytes of all layers.
        least: the fewest entries that a share may come to.
        auto: whether it is a ceiling: less is kept where memory is short.
    """

    entries: int | None = None
    share: float | None = None
    nbytes: int | None = None
    least: int = 1
    auto: bool = False

    @property
    def floor(self) -> "Budget":
        """The least that is kept where memory is short; the same, unless it is a ceiling."""
        return Budget(share=AUTO_SHARE, least=AUTO_LEAST) if self.auto else self

    def resolve(
        self,
        shape: ModelShape,
        method: Method,
        seen: int,
        planned: int,
        itemsize: int,
        bits: KVBits | None = None,
        limit: int = 0,
    ) -> int:
        """Mean entries a KV head and layer.

        Args:
            seen: tokens read before the answer.
            planned: tokens of the answer that bytes are reckoned with.
            itemsize: bytes of a number in the cache that is not quantized.
            limit: tokens at which the answer ends, if that is later.

        Raises:
            SettingError: the bytes are too few, or the method cannot keep to a size.
        """
        if self.entries is not None:
            return self.entries
        if self.share is not None:
            longest = planned if method.decoding.append_only else max(planned, limit)
            everything = longest if self.share == 1 else 0
            return max(self.least, method.min_budget, int(self.share * seen + 1e-9) + everything)
        assert self.nbytes is not None
        if not method.respects_budget:
            raise SettingError(
                f"--budget {self.nbytes} bytes cannot be kept by {method.spec}, which may keep "
                "more entries than its budget: give a number of entries"
            )
        line = _LineBytes(shape.kv_size, itemsize, 4 * method.decoding.rows, bits)
        answer = planned if planned <= ROOM else -(-planned // ROOM) * ROOM
        grown = 0 if method.decoding.bounded else answer
        most = seen + answer
        sliding = sum(
            size.heads * _LineBytes(size, itemsize, 0, bits).of(min(window.size, most))
            for window, size in zip(shape.windows, shape.kv_sizes, strict=True)
            if window is not None
        )
        heads = max(1, len(shape.full_layers)) * shape.kv_heads
        entries = line.longest((self.nbytes - sliding) // heads) - grown
        needed = min(method.min_budget, seen)
        if entries < needed:
            least = sliding + line.of(needed + grown) * heads
            raise SettingError(
                f"--budget {self.nbytes} bytes is too little for {method.spec} with this model "
                f"and {planned} new tokens: give at least {least} bytes"
            )
        return entries


class _LineBytes:
    """Converts between the entries of one KV head in one layer and bytes."""

    def __init__(self, size: KVSize, itemsize: int, remembered: int, bits: KVBits | None) -> None:
        self.exact = size.entry_bytes(itemsize) + remembered
        self.packed, self.mean, self.recent = self.exact, 0, 0
        if bits is not None:
            self.packed = bits.entry_bytes(size) + remembered
            self.mean = 4 * size.dim
            self.recent = bits.exact + bits.at_once + bits.together - 1

    def of(self, entries: int) -> int:
        """The most bytes that so many entries take."""
        older = max(0, entries - self.recent)
        return (entries - older) * self.exact + (older * self.packed + self.mean if older else 0)

    def longest(self, nbytes: int) -> int:
        """How many entries fit into so many bytes."""
        spare = nbytes - self.recent * self.exact - self.mean
        return self.recent + spare // self.packed if spare >= 0 else nbytes // self.exact


def parse_budget(text: str | int) -> Budget:
    """A budget from what a user wrote: `512`, `25%`, `64MiB`, `auto`.

    Raises:
        SettingError: it is none of these, or not above zero.
    """
    written = str(text).strip()
    if written == "auto":
        return Budget(share=1.0, auto=True)
    match = re.fullmatch(
        r"([+-]?[0-9]{1,400}(?:\.[0-9]{1,18})?)\s*(%|bytes|[kKmMgG]?[iI]?[bB])?", written
    )
    if match is None:
        raise SettingError(
            f"--budget {written!r} is not a budget: give entries (512), a share (25%), "
            "bytes (64MiB) or auto"
        )
    number, unit = float(match[1]), (match[2] or "").upper()
    if number >= 1e18:
        raise SettingError(
            f"--budget {written[:20]}… is more than any cache holds: give auto, or 100% for all"
        )
    if number <= 0:
        raise SettingError(f"--budget {written} keeps nothing: give more than 0")
    if unit == "%":
        if number > 100:
            raise SettingError(f"--budget {written} is more than everything: give up to 100%")
        return Budget(share=number / 100)
    if unit:
        if unit not in UNITS:
            raise SettingError(f"--budget {written!r} has an unknown unit: use KiB, MiB or GiB")
        nbytes = int(number * UNITS[unit])
        if nbytes < LEAST_BYTES:
            raise SettingError(
                f"--budget {written} is less than any model's cache takes: give more, such as 64MiB"
            )
        return Budget(nbytes=nbytes)
    if number != int(number):
        raise SettingError(
            f"--budget {written!r} is not a whole number of entries: give {ceil(number)}, or a "
            "share such as 25%"
        )
    return Budget(entries=int(number))


def require_budget(method: Method, average: int) -> None:
    """Raises SettingError if a budget is too small for a method's options."""
    if average < method.min_budget:
        smaller = ", or a smaller window" if "window" in method.defaults() else ""
        raise SettingError(
            f"a budget of {average} is too small for {method.spec}: "
            f"give it at least {method.min_budget} entries (--budget){smaller}"
        )


def method_and_budget(method: str, budget: str | int) -> tuple[Method, Budget]:
    """The method and the budget a user wrote.

    Raises:
        SettingError: one of them cannot be parsed, or they do not fit each other.
    """
    chosen, budget_spec = parse_method(method), parse_budget(budget)
    if budget_spec.entries is not None:
        require_budget(chosen, budget_spec.entries)
    return chosen, budget_spec
