"""The bits of keys and values in the cache."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from kvlite.cache.kv_size import KVSize
from kvlite.errors import SettingError

UNCHANGED, AUTO = "16", "auto"
_WIDTHS = (2, 4, 8)
_GROUPS, _GROUP, _KIVI_GROUP = (16, 32, 64, 128), 64, 32
PACKED_AT_ONCE = 32


@dataclass(frozen=True)
class KVBits:
    """A quantized cache, as it was asked for.

    Attributes:
        keys, values: bits a channel, 2, 4 or 8; latents (MLA) have the keys'.
        group: channels of an entry (and, of keys `by_channel`, entries of a channel) that share a
            scale; less where the head's dimension is no multiple of it.
        by_channel: keys channel by channel over neighboring entries, as in "KIVI: A Tuning-Free
            Asymmetric 2bit Quantization for KV Cache", section 3.3; entries then cannot be dropped
            one by one.
        sinks: first entries of a head that stay exact.
        recent: last entries that stay exact, at least.
    """

    keys: int
    values: int
    group: int = _GROUP
    by_channel: bool = False
    sinks: int = 4
    recent: int = 32

    def __str__(self) -> str:
        """As a user writes it."""
        kivi = "kivi" if self.by_channel else ""
        sides = str(self.keys) if self.keys == self.values else f"k{self.keys}v{self.values}"
        usual = _KIVI_GROUP if self.by_channel else _GROUP
        return kivi + sides + (f"g{self.group}" if self.group != usual else "")

    @property
    def exact(self) -> int:
        """Entries of a head that stay exact, at least."""
        return self.sinks + self.recent

    @property
    def at_once(self) -> int:
        """Entries that are quantized together."""
        return max(PACKED_AT_ONCE, self.group) if self.by_channel else PACKED_AT_ONCE

    def packed(self, line: int) -> int:
        """How many of a head's entries are quantized."""
        count = max(0, line - self.exact)
        return count // self.group * self.group if self.by_channel else count

    def saves(self, size: KVSize) -> bool:
        """Whether a quantized entry is smaller than one of 16 bits: groups that a head's size
        shares few factors with have so many scales that it is not."""
        return self.entry_bytes(size) < size.entry_bytes(2)

    def entry_bytes(self, size: KVSize) -> int:
        """Bytes of one quantized entry of one KV head: codes, scales and offsets, position."""
        dim, share = size.dim, gcd(self.group, size.dim)
        scales = 4 * dim // share
        of_keys = 4 * dim // self.group if self.by_channel else scales
        of_values = 0 if size.latent else dim * self.values // 8 + scales
        return dim * self.keys // 8 + of_keys + of_values + 4


def written(bits: KVBits | None) -> str:
    """As a user writes them."""
    return UNCHANGED if bits is None else str(bits)


def parse_kv_bits(text: str | int) -> KVBits | None:
    """What a user wrote: `16` for no quantization (None), `8`, `4`, `2`, `k8v4`; with another group
    `4g32`; KIVI's layout `kivi4`. `auto` is none, where no plan made something of it. Raises
    SettingError if it is none of these."""
    asked = str(text).strip().lower()
    if asked in (UNCHANGED, AUTO):
        return None
    match = re.fullmatch(r"(kivi)?(?:([0-9])|k([0-9])v([0-9]))(?:g([0-9]{2,3}))?", asked)
    keys, values = (int(match[2] or match[i]) for i in (3, 4)) if match else (0, 0)
    by_channel = bool(match and match[1])
    group = int(match[5]) if match and match[5] else _KIVI_GROUP if by_channel else _GROUP
    if keys not in _WIDTHS or values not in _WIDTHS or group not in _GROUPS:
        raise SettingError(
            f"--kv-bits {str(text)!r} is not one of 16 (not quantized), 8, 4, 2, or keys and "
            "values apart, as in k8v4; a group of 16, 32, 64 or 128 may follow, as in 4g32, and "
            "kivi come first, as in kivi4"
        )
    return KVBits(keys, values, group, by_channel)


def saving(widths: Sequence[str], sizes: Sequence[KVSize]) -> dict[str, KVBits | None]:
    """Those of some widths, as a user writes them and parsed, with which entries of these sizes are
    smaller than with 16 bits, and 16 itself."""
    found = {width: parse_kv_bits(width) for width in widths}
    return {
        width: bits
        for width, bits in found.items()
        if bits is None or all(bits.saves(size) for size in sizes)
    }
