"""Checks that quantized and merged entries from a file fit together, because compiled loops do not.

A checksum finds accidental damage; these checks find files that were forged with valid checksums.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlite.cache.bits import KVBits
from kvlite.cache.head_group import PackedSource
from kvlite.cache.packed import Packed
from kvlite.cache.pair import Half, Merged
from kvlite.cache.quantization import FORMS
from kvlite.cache.quantization.vectors import QuantizedVectors
from kvlite.cache.segment import Exact
from kvlite.errors import SnapshotError


def require(holds: bool) -> None:
    """Raise SnapshotError unless a condition holds; the caller adds the file's name."""
    if not holds:
        raise SnapshotError("its parts do not fit together")


def require_sound(value: Any) -> None:
    """Raise SnapshotError if the parts of an object do not fit together."""
    check = _vectors if isinstance(value, QuantizedVectors) else _CHECKS[type(value)]
    check(value)


def _of(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    require(tensor.dtype == dtype and tensor.shape == shape)


def _bits(bits: KVBits) -> None:
    require(bits.form in FORMS and bits.group > 0)
    require(bits.keys in bits.of_keys.widths and bits.values in bits.of_values.widths)
    require(min(bits.sinks, bits.recent) >= 0)


def _exact(exact: Exact) -> None:
    require(exact.vectors.dim() == 4 and exact.vectors.is_floating_point())


def _vectors(held: QuantizedVectors) -> None:
    form = next(each for each in FORMS.values() if each.vectors is type(held))
    require(held.bits in form.widths and all(each.dim() == 4 for each in held.tensors))
    require(held.dim > 0 and held.group > 0)
    shape = (*held.tensors[0].shape[:2], held.count, held.dim)
    sound = type(held).empty(shape, held.bits, held.group, torch.device("meta"))
    for mine, expected in zip(held.tensors, sound.tensors, strict=True):
        _of(mine, expected.dtype, *expected.shape)


def _packed(held: Packed) -> None:
    require(held.mean.dim() == 3)
    batch, heads, dim = held.mean.shape
    _of(held.mean, torch.float32, batch, heads, dim)
    _of(held.positions, torch.int32, batch, heads, held.count)
    require((type(held.keys), held.keys.bits) == (held.bits.of_keys.vectors, held.bits.keys))
    values = type(held.values), held.values.bits
    require(held.latent or values == (held.bits.of_values.vectors, held.bits.values))
    for each in (held.keys, held.values):
        shape = (*each.tensors[0].shape[:2], each.count, each.dim)
        require(shape == (batch, heads, held.count, dim))


def _merged(held: Merged) -> None:
    require(held.exact.dim() == 4 and held.exact.is_floating_point())
    batch, heads, apart, dim = held.exact.shape
    shared = held.units
    if isinstance(shared, Exact):
        require(shared.vectors.shape == (batch, heads, shared.count, dim))
    else:
        require((*shared.tensors[0].shape[:2], shared.dim) == (batch, heads, dim))
    require(held.magnitudes.is_floating_point())
    _of(held.magnitudes, held.magnitudes.dtype, batch, heads, shared.count)
    _of(held.retained, torch.int32, batch, heads, apart)
    if apart:
        low, high = held.retained.aminmax()
        require(int(low) >= 0 and int(high) < held.units.count)


def _half(held: Half) -> None:
    require(held.keys.exact.shape[3] == held.values.exact.shape[3])
    for side in (held.keys, held.values):
        _of(held.positions, torch.int32, *side.magnitudes.shape)


def _origin(held: PackedSource) -> None:
    batch, heads = held.packed.positions.shape[:2]
    require(all(0 <= row < heads for row in held.rows))
    _of(held.places, torch.int64, batch, len(held.rows), held.places.shape[-1])
    if held.places.numel():
        low, high = held.places.aminmax()
        require(int(low) >= -1 and int(high) < held.packed.count)


_CHECKS: dict[type, Callable[[Any], None]] = {
    KVBits: _bits,
    Exact: _exact,
    Packed: _packed,
    Merged: _merged,
    Half: _half,
    PackedSource: _origin,
}
