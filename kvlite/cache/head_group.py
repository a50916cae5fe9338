"""A head group: KV heads of one layer that hold equally many entries, viewed densely.

A head group owns no memory. Its tensors are views into the flat buffers of a `LayerCache`, so heads
with different budgets lie in different head groups, and each takes only the slots it needs. Older
entries may be in a compressed segment instead, and are then computed whenever they are read. They
come between the head group's first own slots and the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.cache.packed import Packed
from kvlite.cache.segment import CompressedSegment, Places, Write
from kvlite.errors import CapacityError
from kvlite.ops.device import has_triton


@dataclass(frozen=True)
class PackedSource:
    """Where entries of a head group are stored quantized, beside or instead of its own slots.

    Attributes:
        packed: there.
        places: `(batch, heads, slots)` int64, the place of each of the head group's first slots; -1
            for those that are not packed.
        rows: the head group's heads, as indices into the tensors there.
    """

    packed: Packed
    places: Tensor
    rows: tuple[int, ...]

    def places_of(self, used: int) -> Tensor:
        """The place of each of the first `used` slots, `(batch, heads, used)`."""
        later = max(0, used - self.places.shape[2])
        return F.pad(self.places, (0, later), value=-1)[:, :, :used]


@dataclass(slots=True)
class KVHeadGroup:
    """Entries of `len(heads)` KV heads, all with the same capacity and the same fill.

    Attributes:
        heads: indices of the KV heads within the layer, ascending.
        residual_keys, residual_values: `(batch, heads, slots, dim)`, keys after their rotation; the
            slots that can be written. If heads share keys, only the first head's are there. With
            latents (MLA) both are the same tensor, and an entry's key is its value.
        residual_positions: `(batch, heads, slots)` int32, a token's index in everything read so
            far.
        rows: `(batch, heads, R, capacity)` float32, the last R attention rows seen while
            decoding, averaged over a KV head's queries; or with R = 1 the sum of all rows since
            the first token, or the most attention in a reconstruction; None for methods that need
            none.
        selection_scores: `(batch, heads, used)` float32, by which the entries were chosen. Kept, on
            the device or on the host, until all layers are read and share the budget by them; None
            for methods whose layers do not.
        segment: its compressed segment, if it has one.
        packed_before: the quantized source of entries that were restored, kept until a cut
            quantizes them again.
        used: slots filled, the segment's included, the same for every head and sequence.
        capacity: entries per head that there is storage for, once older ones are quantized; its
            slots, unless given.
        history_index: which of the R rows was written last.
        head_alias: KV heads of the layer that hold nothing, each with the head of this group whose
            attention output it takes.
    """

    heads: tuple[int, ...]
    residual_keys: Tensor
    residual_values: Tensor
    residual_positions: Tensor
    rows: Tensor | None = None
    selection_scores: Tensor | None = None
    segment: CompressedSegment | None = None
    packed_before: PackedSource | None = None
    used: int = 0
    capacity: int = 0
    history_index: int = field(default=-1)
    head_alias: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity = self.capacity or self.slots

    @property
    def residuals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions of its own slots."""
        return self.residual_keys, self.residual_values, self.residual_positions

    @property
    def latent(self) -> bool:
        """Whether an entry is one vector, its key and its value."""
        return self.residual_values is self.residual_keys

    @property
    def shares_keys(self) -> bool:
        """Whether its heads attend with the first one's queries and keys, to their own values."""
        return self.residual_keys.shape[1] < len(self.heads)

    @property
    def asking_heads(self) -> tuple[int, ...]:
        """For each of its heads, the KV head whose queries and keys it attends with."""
        return self.heads[:1] * len(self.heads) if self.shares_keys else self.heads

    @property
    def keys(self) -> Tensor:
        """`(batch, heads, capacity, dim)`; a copy if there is a segment: free it after use."""
        if self.shares_keys:
            return self.residual_keys.expand(-1, len(self.heads), -1, -1)
        if self.segment is None:
            return self.residual_keys
        return self._whole(self.residual_keys, self.segment.write_keys)

    @property
    def values(self) -> Tensor:
        """`(batch, heads, capacity, dim)`; a copy if there is a segment: free it after use."""
        if self.segment is None:
            return self.residual_values
        return self._whole(self.residual_values, self.segment.write_values)

    @property
    def positions(self) -> Tensor:
        """`(batch, heads, capacity)` int32."""
        if self.segment is None:
            return self.residual_positions
        before, after = self.residual_positions.tensor_split([self.segment.start], 2)
        return torch.cat([before, self.segment.positions, after], 2)[:, :, : self.capacity]

    def _whole(self, own: Tensor, write: Callable[[Tensor], None]) -> Tensor:
        whole = own.new_empty(*own.shape[:2], min(self.slots, self.capacity), own.shape[3])
        self._write(own, write, whole)
        return whole

    def _write(self, own: Tensor, write: Callable[[Tensor], None], out: Tensor) -> None:
        assert self.segment is not None
        start, end = self.segment.start, self.segment.start + self.segment_len
        out[:, :, :start] = own[:, :, :start]
        write(out[:, :, start:end])
        out[:, :, end:] = own[:, :, start : start + out.shape[2] - end]

    def write_out(self, keys: Tensor, values: Tensor) -> None:
        """Restore all that is held, slot by slot, into `(batch, heads, used, dim)`."""
        assert self.segment is not None
        self._write(self.residual_keys, self.segment.write_keys, keys)
        self._write(self.residual_values, self.segment.write_values, values)

    @property
    def packed(self) -> Packed | None:
        """Its segment, if the entries there are quantized."""
        return None if self.segment is None else self.segment.packed

    @property
    def by_entry(self) -> bool:
        """Whether each of its entries is held by itself, so that any can be replaced."""
        packed = self.packed
        return self.segment is None if packed is None else packed.bits.together == 1

    @property
    def has_kernels(self) -> bool:
        """Whether compiled loops and Triton's kernels read its entries, and replace any."""
        packed = self.packed
        return self.segment is None if packed is None else packed.bits.has_kernels

    @property
    def segment_len(self) -> int:
        """Entries per head in the segment."""
        return 0 if self.segment is None else self.segment.positions.shape[2]

    @property
    def residual_len(self) -> int:
        """How many of the head group's own slots are filled."""
        return self.used - self.segment_len

    def residual_slots(self, slots: Tensor) -> Tensor:
        """Where `slots` that are not of the segment lie among the head group's own."""
        if self.segment is None:
            return slots
        return torch.where(slots < self.segment.start, slots, slots - self.segment_len)

    @property
    def packed_source(self) -> PackedSource | None:
        """Where its entries are quantized, or were."""
        packed = self.packed
        if packed is None:
            return self.packed_before
        slots = torch.arange(self.used, device=self.residual_positions.device)
        places = slots - packed.start
        places[places >= self.segment_len] = -1
        places.clamp_(min=-1)
        rows = tuple(range(len(self.heads)))
        return PackedSource(packed, places.expand(*self.residual_positions.shape[:2], -1), rows)

    @property
    def slots(self) -> int:
        """Slots per head, of the segment and its own."""
        return self.segment_len + self.residual_keys.shape[2]

    @property
    def room(self) -> int:
        """Entries per head that it can still take, once older ones are quantized."""
        return self.capacity - self.used

    @property
    def free(self) -> int:
        """Entries per head that it can take as it is."""
        return min(self.room, self.slots - self.used)

    @property
    def storage(self) -> Packed | None:
        """What its segment is the beginning of, where more can be quantized in place."""
        return None if self.packed is None else self.packed.storage

    @property
    def spare(self) -> int:
        """Entries per head that can still be quantized in place."""
        return 0 if self.storage is None else self.storage.count - self.segment_len

    def fill(self, used: int) -> None:
        """Let so many entries count, quantized as far as they would be, without any numbers: to
        plan."""
        self.used, storage = used, self.storage
        if storage is not None:
            count = max(self.segment_len, min(storage.bits.packed(used), storage.count))
            self.segment = storage.first(count)

    def packing(self) -> Write:
        """Quantize what is no longer recent, in the storage that the segment is the beginning of.
        Entries come in order of their positions then."""
        storage, used, before = self.storage, self.used, self.segment_len
        assert storage is not None
        count = min(storage.bits.packed(used), storage.count)
        first, new = storage.start, count - before
        order = self.residual_positions[:, :, first : self.residual_len].argsort(-1) + first
        keys, values, positions = (
            each.gather(2, order if each.dim() == 3 else wide(order, each))
            for each in self.residuals
        )
        stay = slice(first, self.residual_len - new)
        rows = self.rows
        if rows is not None:
            index = (order + before)[:, :, None].expand(-1, -1, rows.shape[2], -1)
            rows = rows.gather(3, index)
        # It does not count there yet.
        leaving = (each[:, :, :new] for each in (keys, values, positions))
        storage.write(slice(before, count), *leaving)
        longer = storage.first(count)

        def write() -> None:
            for own, each in zip(self.residuals, (keys, values, positions), strict=True):
                own[:, :, stay] = each[:, :, new:]
            if rows is not None and self.rows is not None:
                self.rows[..., first + before : used] = rows
            self.segment = longer

        return write

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write entries `(batch, heads, n, dim)` at positions `(n,)` int32. Raises CapacityError if
        fewer than n slots are `free`."""
        count = keys.shape[2]
        if count > self.free:
            raise CapacityError(
                f"cannot write {count} entries at slot {self.used} of a head group of {self.slots}"
            )
        at = self.residual_len
        if count == 1 and has_triton(keys.device) and not self.shares_keys:
            from kvlite.ops.triton_write import write_token

            own_keys, own_values, own_positions = (each[:, :, at] for each in self.residuals)
            into = own_keys, own_values, own_positions
            write_token(keys[:, :, 0], values[:, :, 0], positions, into)
            self.used += 1
            return
        self.residual_keys.narrow(2, at, count).copy_(keys[:, : self.residual_keys.shape[1]])
        self.residual_values.narrow(2, at, count).copy_(values)
        self.residual_positions.narrow(2, at, count).copy_(positions)
        self.used += count

    def overwrite(
        self, slots: Tensor, keys: Tensor, values: Tensor, position: int | Tensor
    ) -> None:
        """Write one new entry per head, `(batch, heads, 1, dim)`, over `slots` (batch, heads), none
        of them in a segment that is fixed.

        Args:
            position: the new entry's, a number or `(1,)` on the device.

        The new entry is exact. If the evicted entry is quantized, the oldest exact entry that is
        not among the first takes its place, and the new entry takes that one's slot.

        Raises:
            CapacityError: the head group still has room, so nothing has to be evicted.
        """
        if self.room:
            raise CapacityError(
                f"a head group with {self.room} free slots has nothing to overwrite"
            )
        moves: list[Write] = []
        if self.packed is not None:
            slots, moves = self._packed_into(slots, self.packed)
        index = slots[:, :, None]
        own = self.residual_slots(index)
        place = own[..., None].expand(-1, -1, 1, keys.shape[-1])
        # All that has to be allocated is.
        for move in moves:
            move()
        self.residual_keys.scatter_(2, place, keys)
        self.residual_values.scatter_(2, place, values)
        if isinstance(position, Tensor):
            self.residual_positions.scatter_(2, own, position.int().expand(own.shape))
        else:
            self.residual_positions.scatter_(2, own, position)
        if self.rows is not None:
            self.rows.scatter_(3, index[:, :, None].expand(-1, -1, self.rows.shape[2], 1), 0.0)

    def _packed_into(self, slots: Tensor, segment: Packed) -> tuple[Tensor, list[Write]]:
        # The oldest exact entry goes into the segment, where the evicted one was.
        start, end = segment.start, segment.start + self.segment_len
        inside = (slots >= start) & (slots < end)
        oldest = self.residual_positions[:, :, start : self.residual_len].argmin(-1) + start
        place = oldest[..., None, None].expand(-1, -1, 1, self.residual_keys.shape[3])
        packed = segment.putting(
            (slots - start).clamp(0, self.segment_len - 1),
            self.residual_keys.gather(2, place).squeeze(2),
            self.residual_values.gather(2, place).squeeze(2),
            self.residual_positions.gather(2, oldest[..., None]).squeeze(2),
            inside,
        )
        freed = torch.where(inside, oldest + self.segment_len, slots)
        if self.rows is None:
            return freed, [packed]
        count = self.rows.shape[2]
        old, new = (each[:, :, None, None].expand(-1, -1, count, 1) for each in (freed, slots))
        moved = partial(self.rows.scatter_, 3, new, self.rows.gather(3, old))
        return freed, [packed, moved]

    def replace(self, at: Places, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write entries, `(n, dim)` with positions `(n,)`, over n slots, none of them in a segment
        that is fixed. The attention recorded for the old entries is dropped."""
        everywhere, (batch, heads, slots), write_packed = at, at, None
        if self.packed is not None:
            places = slots - self.packed.start
            inside = (places >= 0) & (places < self.segment_len)
            if inside.any():
                packed = batch[inside], heads[inside], places[inside]
                write_packed = self.packed.replacing(
                    packed, keys[inside], values[inside], positions[inside]
                )
                outside = ~inside
                batch, heads, slots = batch[outside], heads[outside], slots[outside]
                keys, values, positions = keys[outside], values[outside], positions[outside]
        own = batch, heads, self.residual_slots(slots)
        # All that has to be allocated is; positions come last, as others choose by them.
        if self.rows is not None:
            batch, heads, slots = everywhere
            self.rows[batch, heads, :, slots] = 0.0
        self.residual_keys[own], self.residual_values[own] = keys, values
        if write_packed is not None:
            write_packed()
        self.residual_positions[own] = positions

    def keep_ends(self, first: int, last: int) -> None:
        """Drop, in place, all entries but the first and the last ones."""
        assert self.segment is None
        recent, kept = slice(self.used - last, self.used), slice(first, first + last)
        packed_before = self.packed_before
        copies = [each[:, :, recent].clone() for each in self.residuals]
        if packed_before is not None:
            places = packed_before.places_of(recent.stop)
            both = torch.cat([places[:, :, :first], places[:, :, recent]], 2)
            packed_before = replace(packed_before, places=both)
        for each, copy in zip(self.residuals, copies, strict=True):
            each[:, :, kept] = copy
        self.used, self.packed_before = kept.stop, packed_before

    def copy_first(self, other: "KVHeadGroup", count: int) -> None:
        """Copy the first entries of another one's own slots, from any device."""
        for own, given in zip(self.residuals, other.residuals, strict=True):
            own[:, :, :count] = given[:, :, :count]

    def record(self, row: Tensor) -> None:
        """Record an attention row, `(batch, heads, used)`, in place of the oldest one."""
        assert self.rows is not None
        newest = (self.history_index + 1) % self.rows.shape[2]
        self.rows[:, :, newest, : self.used] = row
        self.history_index = newest

    def add(self, row: Tensor) -> None:
        """Add attention, `(batch, heads, used)`, to the row of sums."""
        assert self.rows is not None and self.rows.shape[2] == 1
        self.rows[:, :, 0, : self.used] += row

    def raise_to(self, start: int, row: Tensor) -> None:
        """Raise the row to at least the attention `(batch, heads, n)` to the slots from `start`
        on."""
        assert self.rows is not None and self.rows.shape[2] == 1
        so_far = self.rows[:, :, 0, start : start + row.shape[2]]
        torch.maximum(so_far, row, out=so_far)

    def scores(self) -> Tensor:
        """The recorded attention to each entry, summed: `(batch, heads, used)` float32."""
        assert self.rows is not None
        return self.rows[..., : self.used].sum(2)


def wide(slots: Tensor, entries: Tensor) -> Tensor:
    """Slots `(batch, heads, n)` of entries `(batch, heads, slots, dim)`, for each of their
    channels, as `gather` and `scatter` want them."""
    return slots[..., None].expand(-1, -1, -1, entries.shape[3])
