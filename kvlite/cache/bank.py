"""A bank: KV heads of one layer that hold equally many entries, viewed densely.

A bank owns no memory. Its tensors are views into the flat buffers of a `LayerCache`, so heads
with different budgets lie in different banks and each takes only the slots it needs. Its first
entries may be those of a front instead, computed whenever they are read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlite.cache.front import Front
from kvlite.errors import CapacityError


@dataclass(slots=True)
class Bank:
    """Entries of `len(heads)` KV heads, all with the same capacity and the same fill.

    Attributes:
        heads: indices of the KV heads within the layer, ascending.
        own_keys, own_values: `(batch, heads, slots, dim)`, keys after their rotation; the slots
            that can be written.
        own_positions: `(batch, heads, slots)` int32, a token's index in everything read so far.
        rows: `(batch, heads, R, capacity)` float32, the last R attention rows seen while
            decoding, averaged over a KV head's queries; or with R = 1 the sum of all rows since
            the first token, or the most attention in a rehearsal; None for methods that need
            none.
        votes: `(batch, heads, used)` float32, by which what was read was chosen, until all layers
            are read and share the budget by them; None for methods whose layers do not.
        front: what lies before its own slots, if anything.
        used: slots filled, the front's included, the same for every head and sequence.
        newest_row: which of the R rows was written last.
    """

    heads: tuple[int, ...]
    own_keys: Tensor
    own_values: Tensor
    own_positions: Tensor
    rows: Tensor | None = None
    votes: Tensor | None = None
    front: Front | None = None
    used: int = 0
    newest_row: int = field(default=-1)

    @property
    def keys(self) -> Tensor:
        """`(batch, heads, capacity, dim)`; with a front a copy, to be let go after use."""
        if self.front is None:
            return self.own_keys
        return self._whole(self.own_keys, self.front.write_keys)

    @property
    def values(self) -> Tensor:
        """`(batch, heads, capacity, dim)`; with a front a copy, to be let go after use."""
        if self.front is None:
            return self.own_values
        return self._whole(self.own_values, self.front.write_values)

    @property
    def positions(self) -> Tensor:
        """`(batch, heads, capacity)` int32."""
        if self.front is None:
            return self.own_positions
        return torch.cat([self.front.positions, self.own_positions], 2)

    def _whole(self, own: Tensor, write: Callable[[Tensor], None]) -> Tensor:
        whole = own.new_empty(*own.shape[:2], self.capacity, own.shape[3])
        write(whole[:, :, : self.first_own])
        whole[:, :, self.first_own :] = own
        return whole

    @property
    def first_own(self) -> int:
        """How many slots the front has; those after it are the bank's own."""
        return 0 if self.front is None else self.front.positions.shape[2]

    @property
    def capacity(self) -> int:
        """Slots a head has."""
        return self.first_own + self.own_keys.shape[2]

    @property
    def room(self) -> int:
        """Slots a head has left."""
        return self.capacity - self.used

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write `(batch, heads, n, dim)` entries.

        Args:
            positions: theirs, `(n,)` int32.

        Raises:
            CapacityError: fewer than n slots are left.
        """
        count = keys.shape[2]
        if count > self.room:
            raise CapacityError(
                f"cannot write {count} entries at slot {self.used} of a bank of {self.capacity}"
            )
        own = slice(self.used - self.first_own, self.used - self.first_own + count)
        self.own_keys[:, :, own] = keys
        self.own_values[:, :, own] = values
        self.own_positions[:, :, own] = positions
        self.used += count

    def overwrite(self, slots: Tensor, keys: Tensor, values: Tensor, position: int) -> None:
        """Put one new entry a head, `(batch, heads, 1, dim)`, in place of `slots` (batch, heads),
        which must be the bank's own.

        Raises:
            CapacityError: the bank still has room, so nothing need be given up.
        """
        if self.room:
            raise CapacityError(f"a bank with {self.room} free slots has nothing to overwrite")
        index = slots[:, :, None]
        own = index - self.first_own
        place = own[..., None].expand(-1, -1, 1, keys.shape[-1])
        self.own_keys.scatter_(2, place, keys)
        self.own_values.scatter_(2, place, values)
        self.own_positions.scatter_(2, own, position)
        if self.rows is not None:
            self.rows.scatter_(3, index[:, :, None].expand(-1, -1, self.rows.shape[2], 1), 0.0)

    def record(self, row: Tensor) -> None:
        """Remember an attention row, `(batch, heads, used)`, in place of the oldest one."""
        assert self.rows is not None
        self.newest_row = (self.newest_row + 1) % self.rows.shape[2]
        self.rows[:, :, self.newest_row, : self.used] = row

    def add(self, row: Tensor) -> None:
        """Add attention, `(batch, heads, used)`, to the one row that is the sum of all."""
        assert self.rows is not None and self.rows.shape[2] == 1
        self.rows[:, :, 0, : self.used] += row

    def raise_to(self, start: int, row: Tensor) -> None:
        """Let the one row be no less than attention `(batch, heads, n)` to the slots from `start`
        on."""
        assert self.rows is not None and self.rows.shape[2] == 1
        so_far = self.rows[:, :, 0, start : start + row.shape[2]]
        torch.maximum(so_far, row, out=so_far)

    def scores(self) -> Tensor:
        """The remembered attention each entry got, summed: `(batch, heads, used)` float32."""
        assert self.rows is not None
        return self.rows[..., : self.used].sum(2)
