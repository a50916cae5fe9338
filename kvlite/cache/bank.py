"""A bank: KV heads of one layer that hold equally many entries, viewed densely.

A bank owns no memory. Its tensors are views into the flat buffers of a `LayerCache`, so heads
with different budgets lie in different banks and each takes only the slots it needs.
"""

from dataclasses import dataclass, field

from torch import Tensor

from kvlite.errors import CapacityError


@dataclass(slots=True)
class Bank:
    """Entries of `len(heads)` KV heads, all with the same capacity and the same fill.

    Attributes:
        heads: indices of the KV heads within the layer, ascending.
        keys, values: `(batch, heads, capacity, dim)`, keys after their rotation.
        positions: `(batch, heads, capacity)` int32, a token's index in everything read so far.
        rows: `(batch, heads, R, capacity)` float32, the last R attention rows seen while
            decoding, averaged over a KV head's queries; or with R = 1 the sum of all rows since
            the first token; None for methods that need none.
        votes: `(batch, heads, used)` float32, by which what was read was chosen, until all layers
            are read and share the budget by them; None for methods whose layers do not.
        used: slots filled, the same for every head and sequence.
        newest_row: which of the R rows was written last.
    """

    heads: tuple[int, ...]
    keys: Tensor
    values: Tensor
    positions: Tensor
    rows: Tensor | None = None
    votes: Tensor | None = None
    used: int = 0
    newest_row: int = field(default=-1)

    @property
    def capacity(self) -> int:
        """Slots a head has."""
        return self.keys.shape[2]

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
        end = self.used + count
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.positions[:, :, self.used : end] = positions
        self.used = end

    def overwrite(self, slots: Tensor, keys: Tensor, values: Tensor, position: int) -> None:
        """Put one new entry a head, `(batch, heads, 1, dim)`, in place of `slots` (batch, heads).

        Raises:
            CapacityError: the bank still has room, so nothing need be given up.
        """
        if self.room:
            raise CapacityError(f"a bank with {self.room} free slots has nothing to overwrite")
        index = slots[:, :, None]
        place = index[..., None].expand(-1, -1, 1, keys.shape[-1])
        self.keys.scatter_(2, place, keys)
        self.values.scatter_(2, place, values)
        self.positions.scatter_(2, index, position)
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

    def scores(self) -> Tensor:
        """The remembered attention each entry got, summed: `(batch, heads, used)` float32."""
        assert self.rows is not None
        return self.rows[..., : self.used].sum(2)
