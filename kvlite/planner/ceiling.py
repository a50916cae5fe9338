"""How much `--budget auto` keeps: everything while it fits, else what does.

Everything in 8 bits comes before fewer entries, as it loses nothing that was measured; 4 bits are
never chosen, as arithmetic suffers from them before needles do.
"""

from collections.abc import Callable

from kvlite.cache.bits import KVBits
from kvlite.methods.base import Method
from kvlite.model.shape import ModelShape

EIGHT = KVBits(8, 8)
# Forecasts that look for the largest budget that fits, and what budgets are multiples of.
_TRIES, _STEP = 4, 64


def may_round(shape: ModelShape, method: Method) -> bool:
    """Whether 8 bits make a model's cache smaller, and a method can do with them."""
    saves = all(size.dim % 2 == 0 and EIGHT.saves(size) for size in shape.kv_sizes)
    return saves and method.prefilling.mask is None


def what_fits(
    missing: Callable[[int, KVBits | None], int], everything: int, least: int, *, may_round: bool
) -> tuple[int, KVBits | None]:
    """The largest budget that fits, and the bits of the cache; the least one if none does.

    Args:
        missing: given mean entries a KV head and bits, the bytes that are lacking; zero or less if
            it fits. Grows with the entries.
        everything: entries with which nothing is dropped.
        least: the fewest that may be kept.
        may_round: whether the bits were left open.
    """
    over = missing(everything, None)
    if over <= 0:
        return everything, None
    if may_round and missing(everything, EIGHT) <= 0:
        return everything, EIGHT
    low, high, spare = least, everything, -missing(least, None)
    for _ in range(_TRIES if spare > 0 else 0):
        # Where a straight line crosses: peaks are the largest of several, so it mostly fits there.
        middle = (low + (high - low) * spare // (spare + over)) // _STEP * _STEP
        if not low < middle < high:
            break
        lacking = missing(middle, None)
        if lacking <= 0:
            low, spare = middle, -lacking
        else:
            high, over = middle, lacking
    return low, None
