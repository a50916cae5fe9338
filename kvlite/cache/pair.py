"""Two layers that share the directions of their keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Merged:
    """Keys, or values, of one layer of a pair.

    Attributes:
        units: `(batch, heads, entries, dim)`, directions; the very tensor that the other layer has.
        retained: `(batch, heads, r)` int32, entries that both layers hold exactly; shared too.
        magnitudes: `(batch, heads, entries)`, this layer's.
        exact: `(batch, heads, r, dim)`, this layer's retained entries.
    """

    units: Tensor
    retained: Tensor
    magnitudes: Tensor
    exact: Tensor

    def write(self, out: Tensor) -> None:
        """Restore all entries into `out`, in the shape of `units`."""
        torch.mul(self.units, self.magnitudes[..., None], out=out)
        place = self.retained.long()[..., None].expand_as(self.exact)
        out.scatter_(2, place, self.exact)


@dataclass(frozen=True)
class Half:
    """One layer of a pair, as the front of a bank.

    Attributes:
        positions: `(batch, heads, entries)` int32, ascending; shared with the other layer.
    """

    keys: Merged
    values: Merged
    positions: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds, of which the other layer has the very same directions, retained
        entries' places and positions."""
        keys, values = (
            (each.units, each.retained, each.magnitudes, each.exact)
            for each in (self.keys, self.values)
        )
        return (*keys, *values, self.positions)

    def write_keys(self, out: Tensor) -> None:
        """Restore the keys."""
        self.keys.write(out)

    def write_values(self, out: Tensor) -> None:
        """Restore the values."""
        self.values.write(out)

    def shares_with(self, other: "Half") -> bool:
        """Whether the two are halves of one pair."""
        return self.keys.units is other.keys.units and self.values.units is other.values.units


Pair = tuple[Half, Half]
"""The lower layer's half and the upper one's."""


def joined(earlier: Pair, later: Pair) -> Pair:
    """Entries of two pairs, one after the other, as one pair; copied as they are."""
    keys = _joined([half.keys for half in earlier], [half.keys for half in later])
    values = _joined([half.values for half in earlier], [half.values for half in later])
    positions = torch.cat([earlier[0].positions, later[0].positions], 2)
    lower, upper = (Half(*each, positions) for each in zip(keys, values, strict=True))
    return lower, upper


def _joined(earlier: list[Merged], later: list[Merged]) -> list[Merged]:
    (before, _), (after, _) = earlier, later
    units = torch.cat([before.units, after.units], 2)
    retained = torch.cat([before.retained, after.retained + before.units.shape[2]], 2)
    return [
        Merged(
            units,
            retained,
            torch.cat([old.magnitudes, new.magnitudes], 2),
            torch.cat([old.exact, new.exact], 2),
        )
        for old, new in zip(earlier, later, strict=True)
    ]
