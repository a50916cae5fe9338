"""Two layers that share the directions of their keys and values."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlite.cache.quantization.vectors import QuantizedVectors
from kvlite.cache.segment import Exact


@dataclass(frozen=True)
class Merged:
    """Keys, or values, of one layer of a pair.

    Attributes:
        units: directions, as they are or quantized; the very object that the other layer has.
        retained: `(batch, heads, r)` int32, entries that both layers hold exactly; shared too.
        magnitudes: `(batch, heads, entries)`, this layer's.
        exact: `(batch, heads, r, dim)`, this layer's retained entries.
    """

    units: Exact | QuantizedVectors
    retained: Tensor
    magnitudes: Tensor
    exact: Tensor

    def write(self, out: Tensor) -> None:
        """Restore all entries into `out`, `(batch, heads, entries, dim)`."""
        for part in self.units.blocks():
            torch.mul(self.units.read(part), self.magnitudes[:, :, part, None], out=out[:, :, part])
        place = self.retained.long()[..., None].expand_as(self.exact)
        out.scatter_(2, place, self.exact)

    def dot(self, queries: Tensor) -> Tensor:
        out = self.units.dot(queries) * self.magnitudes[:, :, None].float()
        place = self._place(queries.shape[2])
        return out.scatter_(3, place, queries @ self.exact.float().mT)

    def weigh(self, weights: Tensor) -> Tensor:
        place = self._place(weights.shape[2])
        apart = weights.gather(3, place)
        merged = (weights * self.magnitudes[:, :, None].float()).scatter_(3, place, 0.0)
        return self.units.weigh(merged) + apart @ self.exact.float()

    def _place(self, rows: int) -> Tensor:
        return self.retained.long()[:, :, None].expand(-1, -1, rows, -1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return *self.units.tensors, self.retained, self.magnitudes, self.exact


@dataclass(frozen=True)
class Half:
    """One layer of a pair, as the segment of a head group.

    Attributes:
        values: of latents (MLA) the very object that has the keys.
        positions: `(batch, heads, entries)` int32, ascending; shared with the other layer.
    """

    keys: Merged
    values: Merged
    positions: Tensor

    @property
    def latent(self) -> bool:
        """Whether an entry is one vector, its key and its value."""
        return self.values is self.keys

    @property
    def start(self) -> int:
        return 0

    @property
    def packed(self) -> None:
        return None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.keys.tensors, *self.values.tensors, self.positions

    def write_keys(self, out: Tensor) -> None:
        self.keys.write(out)

    def write_values(self, out: Tensor) -> None:
        self.values.write(out)

    def dot(self, queries: Tensor) -> Tensor:
        return self.keys.dot(queries)

    def weigh(self, weights: Tensor) -> Tensor:
        return self.values.weigh(weights)

    def shares_with(self, other: "Half") -> bool:
        """Whether the two are halves of one pair."""
        return self.keys.units is other.keys.units and self.values.units is other.values.units


Pair = tuple[Half, Half]
"""The lower layer's half and the upper one's."""


def joined(earlier: Pair, later: Pair) -> Pair:
    """Entries of two pairs, one after the other, as one pair; copied as they are."""
    keys = _joined([half.keys for half in earlier], [half.keys for half in later])
    values = keys
    if not later[0].latent:
        values = _joined([half.values for half in earlier], [half.values for half in later])
    positions = torch.cat([earlier[0].positions, later[0].positions], 2)
    lower, upper = (Half(*each, positions) for each in zip(keys, values, strict=True))
    return lower, upper


def _joined(earlier: list[Merged], later: list[Merged]) -> list[Merged]:
    (before, _), (after, _) = earlier, later
    count = before.magnitudes.shape[2]
    units = _units_joined(before.units, after.units)
    retained = torch.cat([before.retained, after.retained + count], 2)
    return [
        Merged(
            units,
            retained,
            torch.cat([old.magnitudes, new.magnitudes], 2),
            torch.cat([old.exact, new.exact], 2),
        )
        for old, new in zip(earlier, later, strict=True)
    ]


def _units_joined(
    before: Exact | QuantizedVectors, after: Exact | QuantizedVectors
) -> Exact | QuantizedVectors:
    if isinstance(after, Exact):
        return Exact(torch.cat([_whole(before).to(after.vectors.dtype), after.vectors], 2))
    same = isinstance(before, type(after)) and (before.bits, before.group) == (
        after.bits,
        after.group,
    )
    if not isinstance(before, type(after)) or not same:
        before = type(after).of(_whole(before), after.bits, after.group)
    return before.joined(after)


def _whole(units: Exact | QuantizedVectors) -> Tensor:
    return units.read(slice(0, units.count))


def packed_directions(
    halves: tuple[Merged, Merged], form: type[QuantizedVectors], bits: int, group: int
) -> tuple[Merged, Merged]:
    """The same keys, or values, of a pair with quantized directions."""
    lower, upper = halves
    units = form.of(_whole(lower.units), bits, group)
    return replace(lower, units=units), replace(upper, units=units)
