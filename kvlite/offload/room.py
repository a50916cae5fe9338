"""How much host memory the tier takes, and how much it may."""

import psutil

from kvlite.cache import KVBits
from kvlite.errors import SettingError
from kvlite.model.shape import ModelShape
from kvlite.sizes import parse_bytes

SHARE = 0.5


def tier_bytes(shape: ModelShape, tokens: int, itemsize: int, bits: KVBits | None) -> int:
    """Bytes of a tier that has read `tokens` at once, the room for an answer included.

    Args:
        itemsize: bytes of a number of the model's keys and values.
    """
    total = 0
    for window in shape.windows:
        entries = tokens if window is None else min(window, tokens)
        packed = 0 if bits is None or window is not None else bits.packed(entries)
        line = (entries - packed) * shape.entry_bytes(itemsize)
        if bits is not None and packed:
            line += packed * bits.entry_bytes(shape.head_dim) + 4 * shape.head_dim
        total += shape.kv_heads * line
    return total


def ram_limit(text: str, held: int) -> int:
    """Bytes that a tier may take: as written, or with `auto` half of what is free without it.

    Args:
        held: bytes it takes now.

    Raises:
        SettingError: it is no size.
    """
    if text == "auto":
        return int(SHARE * (psutil.virtual_memory().available + held))
    limit = parse_bytes(text)
    if limit is None:
        raise SettingError(f"--recall-limit {text!r} is not a size: give 8GiB, 500MB or auto")
    return limit
