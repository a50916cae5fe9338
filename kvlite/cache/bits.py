"""The bits of keys and values in the cache."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvlite.cache.kv_size import KVSize
from kvlite.cache.quantization import FORMS, Form
from kvlite.errors import SettingError

UNCHANGED, AUTO = "16", "auto"
_GROUPS = 16, 32, 64, 128
PACKED_AT_ONCE = 32


@dataclass(frozen=True)
class KVBits:
    """A quantized cache, as it was asked for.

    Attributes:
        keys, values: bits a channel, as its form has them; latents (MLA) have the keys'.
        group: channels of an entry (where they are quantized together, entries of a channel) that
            share a scale; less where the head's dimension is no multiple of it.
        form: which of `FORMS` keys have; values have what its `values` says.
        sinks: first entries of a head that stay exact.
        recent: last entries that stay exact, at least.
    """

    keys: int
    values: int
    group: int = FORMS[""].group
    form: str = ""
    sinks: int = 4
    recent: int = 32

    def __str__(self) -> str:
        """As a user writes it."""
        sides = str(self.keys) if self.keys == self.values else f"k{self.keys}v{self.values}"
        group = f"g{self.group}" if self.group != self.of_keys.group else ""
        return self.form + sides + group

    @cached_property
    def of_keys(self) -> Form:
        """The form of keys, and of latents."""
        return FORMS[self.form]

    @cached_property
    def of_values(self) -> Form:
        """The form of values."""
        values = self.of_keys.values
        return self.of_keys if values is None else FORMS[values]

    @cached_property
    def together(self) -> int:
        """How many neighboring entries are quantized as one; 1 if any can be dropped or
        replaced."""
        return self.group if self.of_keys.together or self.of_values.together else 1

    @cached_property
    def has_kernels(self) -> bool:
        """Whether compiled loops and Triton's kernels read such entries."""
        return self.of_keys.has_kernels and self.of_values.has_kernels

    @property
    def exact(self) -> int:
        """Entries of a head that stay exact, at least."""
        return self.sinks + self.recent

    @property
    def at_once(self) -> int:
        """Entries that are quantized together."""
        return max(PACKED_AT_ONCE, self.together)

    def packed(self, line: int) -> int:
        """How many of a head's entries are quantized."""
        count = max(0, line - self.exact)
        return count // self.together * self.together

    def saves(self, size: KVSize) -> bool:
        """Whether a quantized entry is smaller than one of 16 bits: groups that a head's size
        shares few factors with have so many scales that it is not."""
        return self.entry_bytes(size) < size.entry_bytes(2)

    def entry_bytes(self, size: KVSize) -> int:
        """Bytes of one quantized entry of one KV head: codes, scales and offsets, position."""
        of_keys = self.of_keys.vectors.vector_bytes(size.dim, self.keys, self.group)
        of_values = self.of_values.vectors.vector_bytes(size.dim, self.values, self.group)
        return of_keys + (0 if size.latent else of_values) + 4


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
    form = "|".join(FORMS)
    match = re.fullmatch(rf"({form})(?:([0-9])|k([0-9])v([0-9]))(?:g([0-9]{{2,3}}))?", asked)
    if match is not None:
        keys, values = (int(match[2] or match[i]) for i in (3, 4))
        bits = KVBits(keys, values, int(match[5] or FORMS[match[1]].group), match[1])
        known = keys in bits.of_keys.widths and values in bits.of_values.widths
        if known and bits.group in _GROUPS:
            return bits
        if match[1] and bits.group in _GROUPS:
            widths = ", ".join(map(str, sorted({*bits.of_keys.widths, *bits.of_values.widths})))
            raise SettingError(
                f"--kv-bits {str(text)!r}: {match[1]} has {widths} bits, as in "
                f"{match[1]}{bits.of_keys.widths[0]}"
            )
    forms = " or ".join(filter(None, FORMS))
    raise SettingError(
        f"--kv-bits {str(text)!r} is not one of 16 (not quantized), 8, 4, 2, or keys and values "
        "apart, as in k8v4; a group of 16, 32, 64 or 128 may follow, as in 4g32, and "
        f"{forms} come first, as in kivi4"
    )


def with_form(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `KVBits` from a file; those of version 0.1.0 had `by_channel`."""
    fields = dict(plain)
    if "by_channel" in fields:
        fields["form"] = "kivi" if fields.pop("by_channel") else ""
    return fields


def saving(widths: Sequence[str], sizes: Sequence[KVSize]) -> dict[str, KVBits | None]:
    """Those of some widths, as a user writes them and parsed, with which entries of these sizes are
    smaller than with 16 bits, and 16 itself."""
    found = {width: parse_kv_bits(width) for width in widths}
    return {
        width: bits
        for width, bits in found.items()
        if bits is None or all(bits.saves(size) for size in sizes)
    }
