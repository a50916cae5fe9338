"""Which entries of a head group stay, and copying them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from kvlite.cache.bits import KVBits
from kvlite.cache.head_group import KVHeadGroup, PackedSource, wide
from kvlite.cache.packed import Packed
from kvlite.cache.segment import blocks
from kvlite.ops.heads import of_heads

GroupLength = tuple[int, int]
"""How many KV heads a head group has, and the entries each of them holds."""


@dataclass(frozen=True)
class Selection:
    """What some KV heads of a head group keep: equally many entries a head.

    Attributes:
        source: the head group that holds the entries now.
        slots: `(batch, heads, kept)` int32 or int64, ascending in position along the last
            dimension.
        heads: which heads of `source`, as indices into `source.heads`; None for all of them.
        selection_scores: `(batch, heads, kept)` float32, what they were chosen by, if that is still
            needed.
        share: let these heads share the first one's keys from now on; all keep the same slots.
        dropped: KV heads of the layer that keep nothing, and for each the head whose attention
            output it takes from now on.
    """

    source: KVHeadGroup
    slots: Tensor
    heads: tuple[int, ...] | None = None
    selection_scores: Tensor | None = None
    share: bool = False
    dropped: Mapping[int, int] = field(default_factory=dict)

    @property
    def shares_keys(self) -> bool:
        """Whether the heads will share keys; those that do are not parted."""
        return self.share or self.source.shares_keys

    @property
    def length(self) -> GroupLength:
        """What will be held of it."""
        return self.slots.shape[1], self.slots.shape[2]

    @property
    def rows(self) -> list[int]:
        """Which heads of the source, as indices into its tensors."""
        return list(range(len(self.source.heads)) if self.heads is None else self.heads)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Their indices within the layer."""
        return tuple(self.source.heads[row] for row in self.rows)

    @property
    def head_alias(self) -> dict[int, int]:
        """As of the head group that will hold them."""
        everywhere = {**self.source.head_alias, **self.dropped}
        return {head: other for head, other in everywhere.items() if other in self.kv_heads}

    def without(self, dropped: Mapping[int, int]) -> "Selection | None":
        """The same for the KV heads of the layer that are not dropped; None if no head is left."""
        own = self.rows
        rows = [row for row, i in enumerate(own) if self.source.heads[i] not in dropped]
        if not rows:
            return None
        if len(rows) == len(own):
            return replace(self, dropped=dropped)
        scores = None if self.selection_scores is None else of_heads(self.selection_scores, rows)
        heads = tuple(own[row] for row in rows)
        slots = of_heads(self.slots, rows)
        return Selection(self.source, slots, heads, scores, dropped=dropped)

    @classmethod
    def everything(cls, head_group: KVHeadGroup) -> "Selection":
        """All entries of a head group, in order."""
        return cls(head_group, head_group.positions[:, :, : head_group.used].argsort(dim=-1))

    def copy_to(self, head_group: KVHeadGroup, *, remember_packed: bool) -> None:
        """Fill a new head group of the same heads: what its segment does not hold, in its own
        slots; with `remember_packed` it knows where entries were packed."""
        kept = self.slots.shape[2]
        start = 0 if head_group.segment is None else head_group.segment.start
        if head_group.segment is None and self.source.segment is not None and self._in_order:
            held = slice(0, kept)
            self.source.write_out(
                head_group.residual_keys[:, :, held], head_group.residual_values[:, :, held]
            )
            head_group.residual_positions[:, :, held] = self.source.positions[:, :, held]
        else:
            ahead = head_group.segment_len
            self._copy_part(head_group, slice(0, start), 0)
            self._copy_part(head_group, slice(start + ahead, kept), ahead)
        head_group.used, head_group.selection_scores = kept, self.selection_scores
        head_group.head_alias = self.head_alias
        packed_source = self.source.packed_source
        if remember_packed and packed_source is not None and head_group.segment is None:
            rows = tuple(packed_source.rows[row] for row in self.rows)
            everything = self._places(packed_source, slice(0, kept))
            head_group.packed_before = PackedSource(packed_source.packed, everything, rows)
        self._copy_rows(head_group)

    @property
    def _in_order(self) -> bool:
        every = torch.arange(self.source.used, dtype=self.slots.dtype, device=self.slots.device)
        return self.heads is None and self.slots.equal(every.expand(*self.slots.shape[:2], -1))

    def _copy_part(self, head_group: KVHeadGroup, part: slice, ahead: int) -> None:
        # `ahead` slots before them are not the head group's own.
        for each in self.blocks(part):
            own = slice(each.start - ahead, each.stop - ahead)
            stored = head_group.residual_keys[:, :, own]
            stored.copy_(self.keys(each)[:, : stored.shape[1]])
            head_group.residual_values[:, :, own] = self.values(each)
            head_group.residual_positions[:, :, own] = self.positions(each)

    def _copy_rows(self, head_group: KVHeadGroup) -> None:
        rows, held = head_group.rows, self.source.rows
        if rows is None or held is None or rows.shape[2] != held.shape[2]:
            return
        index = self.slots.long()[:, :, None].expand(-1, -1, held.shape[2], -1)
        rows[..., : head_group.used] = of_heads(held, self.rows).gather(3, index)
        head_group.history_index = self.source.history_index

    def keys(self, part: slice) -> Tensor:
        """Keys of a part of them, `(batch, heads, n, dim)`, restored where they are packed."""
        source = self.source
        exact = source.keys if source.segment is None else source.residual_keys
        return self._entries(part, exact, lambda: source.keys, Packed.write_keys)

    def values(self, part: slice) -> Tensor:
        """Values, likewise."""
        source = self.source
        return self._entries(
            part, source.residual_values, lambda: source.values, Packed.write_values
        )

    def _entries(
        self,
        part: slice,
        exact: Tensor,
        whole: Callable[[], Tensor],
        write: Callable[[Packed, Tensor], None],
    ) -> Tensor:
        # `exact` lies in the source's own slots, `write` restores what is quantized.
        source, slots, segment = self.source, self._slots(part), self.source.segment
        if segment is None:
            return self._gathered(exact, slots)
        own = source.residual_slots(slots).clamp(0, max(0, exact.shape[2] - 1))
        places = slots - segment.start
        inside = (places >= 0) & (places < source.segment_len)
        if not inside.any():
            return self._gathered(exact, own)
        packed = source.packed
        if packed is None or not source.by_entry:
            return self._gathered(whole(), slots)
        held = self._gathered(exact, own)
        restored = torch.empty_like(held)
        write(packed.take(places.clamp(0, packed.count - 1), self.rows), restored)
        return torch.where(inside[..., None], restored, held)

    def _gathered(self, tensor: Tensor, slots: Tensor) -> Tensor:
        index = wide(slots, tensor)
        if self.heads is None:
            return tensor.gather(2, index)
        each = [tensor[:, row].gather(1, index[:, i]) for i, row in enumerate(self.heads)]
        return torch.stack(each, 1)

    def _slots(self, part: slice) -> Tensor:
        return self.slots[:, :, part].long()

    def positions(self, part: slice) -> Tensor:
        """Theirs, `(batch, heads, n)` int32."""
        return of_heads(self.source.positions, self.rows).gather(2, self._slots(part))

    def blocks(self, part: slice) -> list[slice]:
        """A part of them in smaller ones, whose float32 copies are a few megabytes; all at once
        where all has to be restored to pick some; without numbers, two stand for all."""
        if not self.source.by_entry:
            return [part] if part.start < part.stop else []
        batch, heads, _, dim = self.source.residual_keys.shape
        count = part.stop - part.start
        smaller = blocks(count, batch * heads * dim)
        return [
            slice(part.start + each.start, part.start + each.stop)
            for each in (islice(smaller, 2) if self.source.residual_keys.is_meta else smaller)
        ]

    def packed(self, bits: KVBits, room: int = 0) -> Packed | None:
        """Those between the first few and the recent ones, quantized, in storage with `room` for
        more; those that were already, as they are. None if there are none, or the heads share keys,
        which stay exact."""
        middle = slice(bits.sinks, bits.sinks + bits.packed(self.slots.shape[2]))
        count = middle.stop - middle.start
        if not count or self.shares_keys:
            return None
        packed_source = self.source.packed_source
        room += -room % bits.together
        if packed_source is None or packed_source.packed.bits != bits:
            keys = self.source.keys[:, :, : self.source.used]
            mean = of_heads(keys.mean(2, dtype=torch.float32), self.rows).clone()
            made = self._storage(count + room, mean.zero_() if self.source.latent else mean, bits)
            self._quantize(middle, made, 0)
            return made.first(count) if room else made
        heads = [packed_source.rows[row] for row in self.rows]
        places = self._places(packed_source, middle)
        known = places >= 0
        lead = int(known.flatten(0, 1).all(0).cumprod(0).sum())
        before = _unchanged(packed_source.packed, places[:, :, :lead], heads)
        if before is None:
            lead = 0
        elif lead == count and not room:
            return before
        mean = of_heads(packed_source.packed.mean, heads).clone()
        made = self._storage(count + room, mean, bits)
        if before is not None:
            made.copy_first(before)
        self._quantize(slice(middle.start + lead, middle.stop), made, lead)
        late, known = places[:, :, lead:], known[:, :, lead:]
        if bits.together == 1 and known.any():
            taken = packed_source.packed.take(late.clamp(min=0), heads)
            made.copy(slice(lead, count), taken, known)
        return made.first(count) if room else made

    def _places(self, packed_source: PackedSource, part: slice) -> Tensor:
        """Where a part of them is packed, -1 where it is not."""
        places = of_heads(packed_source.places_of(self.source.used), self.rows)
        return places.gather(2, self._slots(part))

    def _storage(self, count: int, mean: Tensor, bits: KVBits) -> Packed:
        return Packed.empty(count, mean, bits, latent=self.source.latent)

    def _quantize(self, part: slice, into: Packed, at: int) -> None:
        """Round a part of them into places from `at` on."""
        for own in self.blocks(part):
            to = slice(own.start - part.start + at, own.stop - part.start + at)
            keys = self.keys(own)
            values = keys if into.latent else self.values(own)
            into.write(to, keys, values, self.positions(own))


def _unchanged(packed: Packed, places: Tensor, heads: list[int]) -> Packed | None:
    # None if there are none, or only all of them could stay.
    every = torch.arange(packed.count, device=places.device).expand(packed.positions.shape)
    if places.equal(every):
        return packed
    if packed.bits.together > 1 or not places.shape[2]:
        return None
    return packed.take(places, heads)
