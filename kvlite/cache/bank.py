"""A bank: KV heads of one layer that hold equally many entries, viewed densely.

A bank owns no memory. Its tensors are views into the flat buffers of a `LayerCache`, so heads
with different budgets lie in different banks and each takes only the slots it needs. Older
entries may be those of a front instead, computed whenever they are read: they then lie between
the bank's first own slots and the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.cache.front import Front, Places, Write
from kvlite.cache.packed import Packed
from kvlite.errors import CapacityError


@dataclass(frozen=True)
class Origin:
    """Where entries of a bank are held packed, beside or instead of its own slots.

    Attributes:
        packed: there.
        places: `(batch, heads, slots)` int64, the place of each of the bank's first slots; -1 for
            those that are not packed.
        rows: the bank's heads, as indices into the tensors there.
    """

    packed: Packed
    places: Tensor
    rows: tuple[int, ...]

    def places_of(self, used: int) -> Tensor:
        """The place of each of the first `used` slots, `(batch, heads, used)`."""
        later = max(0, used - self.places.shape[2])
        return F.pad(self.places, (0, later), value=-1)[:, :, :used]


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
            are read and share the budget by them, on the device or on the host; None for methods
            whose layers do not.
        front: what lies among its own slots, if anything.
        former: where its entries were packed before they were written out, for as long as a cut
            is to come that packs them again.
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
    former: Origin | None = None
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
        before, after = self.own_positions.tensor_split([self.front.start], 2)
        return torch.cat([before, self.front.positions, after], 2)

    def _whole(self, own: Tensor, write: Callable[[Tensor], None]) -> Tensor:
        whole = own.new_empty(*own.shape[:2], self.capacity, own.shape[3])
        self._write(own, write, whole)
        return whole

    def _write(self, own: Tensor, write: Callable[[Tensor], None], out: Tensor) -> None:
        assert self.front is not None
        start, end = self.front.start, self.front.start + self.in_front
        out[:, :, :start] = own[:, :, :start]
        write(out[:, :, start:end])
        out[:, :, end:] = own[:, :, start : start + out.shape[2] - end]

    def write_out(self, keys: Tensor, values: Tensor) -> None:
        """Restore all that is held, slot by slot, into `(batch, heads, used, dim)`."""
        assert self.front is not None
        self._write(self.own_keys, self.front.write_keys, keys)
        self._write(self.own_values, self.front.write_values, values)

    @property
    def in_front(self) -> int:
        """How many entries a head the front has."""
        return 0 if self.front is None else self.front.positions.shape[2]

    @property
    def own_used(self) -> int:
        """How many of the bank's own slots are filled."""
        return self.used - self.in_front

    def own_slots(self, slots: Tensor) -> Tensor:
        """Where `slots` that are not of the front lie among the bank's own."""
        if self.front is None:
            return slots
        return torch.where(slots < self.front.start, slots, slots - self.in_front)

    @property
    def origin(self) -> Origin | None:
        """Where its entries are packed, or were."""
        if not isinstance(self.front, Packed):
            return self.former
        slots = torch.arange(self.used, device=self.own_positions.device)
        places = slots - self.front.start
        places[places >= self.in_front] = -1
        places.clamp_(min=-1)
        rows = tuple(range(len(self.heads)))
        return Origin(self.front, places.expand(*self.own_positions.shape[:2], -1), rows)

    @property
    def capacity(self) -> int:
        """Slots a head has."""
        return self.in_front + self.own_keys.shape[2]

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
        own = slice(self.own_used, self.own_used + count)
        self.own_keys[:, :, own] = keys
        self.own_values[:, :, own] = values
        self.own_positions[:, :, own] = positions
        self.used += count

    def overwrite(self, slots: Tensor, keys: Tensor, values: Tensor, position: int) -> None:
        """Put one new entry a head, `(batch, heads, 1, dim)`, in place of `slots` (batch, heads),
        none of a front's that is fixed.

        What is new is exact: where a quantized entry gives way, the oldest exact one that is not
        among the first takes its place there, and the new one that one's.

        Raises:
            CapacityError: the bank still has room, so nothing need be given up.
        """
        if self.room:
            raise CapacityError(f"a bank with {self.room} free slots has nothing to overwrite")
        moves: list[Write] = []
        if isinstance(self.front, Packed):
            slots, moves = self._packed_into(slots, self.front)
        index = slots[:, :, None]
        own = self.own_slots(index)
        place = own[..., None].expand(-1, -1, 1, keys.shape[-1])
        # All that has to be allocated is.
        for move in moves:
            move()
        self.own_keys.scatter_(2, place, keys)
        self.own_values.scatter_(2, place, values)
        self.own_positions.scatter_(2, own, position)
        if self.rows is not None:
            self.rows.scatter_(3, index[:, :, None].expand(-1, -1, self.rows.shape[2], 1), 0.0)

    def _packed_into(self, slots: Tensor, front: Packed) -> tuple[Tensor, list[Write]]:
        """Room for a new entry where `slots` (batch, heads) give way: there, or, where that is in
        the front, in place of an exact entry that goes there; and what has to move for it."""
        start, end = front.start, front.start + self.in_front
        inside = (slots >= start) & (slots < end)
        oldest = self.own_positions[:, :, start:].argmin(-1) + start
        place = oldest[..., None, None].expand(-1, -1, 1, self.own_keys.shape[3])
        packed = front.putting(
            (slots - start).clamp(0, self.in_front - 1),
            self.own_keys.gather(2, place).squeeze(2),
            self.own_values.gather(2, place).squeeze(2),
            self.own_positions.gather(2, oldest[..., None]).squeeze(2),
            inside,
        )
        freed = torch.where(inside, oldest + self.in_front, slots)
        if self.rows is None:
            return freed, [packed]
        count = self.rows.shape[2]
        old, new = (each[:, :, None, None].expand(-1, -1, count, 1) for each in (freed, slots))
        moved = partial(self.rows.scatter_, 3, new, self.rows.gather(3, old))
        return freed, [packed, moved]

    def replace(self, at: Places, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Put entries, `(n, dim)` with positions `(n,)`, in n slots, none of a front's that is
        fixed; what was remembered of those that were there is forgotten."""
        everywhere, (batch, heads, slots), write_packed = at, at, None
        if isinstance(self.front, Packed):
            places = slots - self.front.start
            inside = (places >= 0) & (places < self.in_front)
            if inside.any():
                packed = batch[inside], heads[inside], places[inside]
                write_packed = self.front.replacing(
                    packed, keys[inside], values[inside], positions[inside]
                )
                outside = ~inside
                batch, heads, slots = batch[outside], heads[outside], slots[outside]
                keys, values, positions = keys[outside], values[outside], positions[outside]
        own = batch, heads, self.own_slots(slots)
        # All that has to be allocated is; positions come last, as others choose by them.
        if self.rows is not None:
            batch, heads, slots = everywhere
            self.rows[batch, heads, :, slots] = 0.0
        self.own_keys[own], self.own_values[own] = keys, values
        if write_packed is not None:
            write_packed()
        self.own_positions[own] = positions

    def keep_ends(self, first: int, last: int) -> None:
        """Let go, in place, of all entries but the first and the last ones."""
        assert self.front is None
        recent, kept = slice(self.used - last, self.used), slice(first, first + last)
        held = (self.own_keys, self.own_values, self.own_positions)
        copies, former = [each[:, :, recent].clone() for each in held], self.former
        if former is not None:
            places = former.places_of(recent.stop)
            both = torch.cat([places[:, :, :first], places[:, :, recent]], 2)
            former = replace(former, places=both)
        for each, copy in zip(held, copies, strict=True):
            each[:, :, kept] = copy
        self.used, self.former = kept.stop, former

    def record(self, row: Tensor) -> None:
        """Remember an attention row, `(batch, heads, used)`, in place of the oldest one."""
        assert self.rows is not None
        newest = (self.newest_row + 1) % self.rows.shape[2]
        self.rows[:, :, newest, : self.used] = row
        self.newest_row = newest

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
