"""One layer's entries: flat, ragged storage with exact byte counts and no write past its end."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kvlite.cache.bits import KVBits
from kvlite.cache.head_group import KVHeadGroup
from kvlite.cache.kv_size import KVSize
from kvlite.cache.segment import CompressedSegment, bytes_held
from kvlite.cache.selection import GroupLength, Selection
from kvlite.ops.device import has_triton


@dataclass(frozen=True)
class Mark:
    """A head group's fill, and its recorded attention rows."""

    used: int
    rows: Tensor | None
    history_index: int


class LayerCache:
    """One layer's entries: flat buffers of `total` slots a sequence, and head groups that view
    them.

    Each KV head owns a run of slots; heads of equal capacity lie together as one `KVHeadGroup`.

    Attributes:
        keys, values: `(batch, total, dim)` flat storage; of keys less, where heads share them; of
            latents (MLA) one and the same.
        positions: `(batch, total)` int32.
        head_groups: views of it, in order of their offset.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[tuple[int, ...], int]],
        *,
        batch: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        decode_rows: int = 0,
        segments: Sequence[CompressedSegment | None] | None = None,
        latent: bool = False,
        sharing: Sequence[bool] | None = None,
        own: Sequence[int] | None = None,
    ) -> None:
        """Allocate room for `sizes`: (KV heads, entries a head) for each head group, those of its
        segment included.

        Args:
            latent: an entry is one vector, its key and its value.
            sharing: of which head groups the heads share keys.
            own: the head groups' own slots a head, unless that is what the segment leaves.
        """
        segments = segments or [None] * len(sizes)
        own = own or [
            capacity - (0 if segment is None else segment.positions.shape[2])
            for (_, capacity), segment in zip(sizes, segments, strict=True)
        ]
        shapes = [(len(heads), slots) for (heads, _), slots in zip(sizes, own, strict=True)]
        key_shapes = [
            (1 if shared else heads, slots)
            for (heads, slots), shared in zip(shapes, sharing or [False] * len(sizes), strict=True)
        ]
        key_lengths, lengths = list(map(prod, key_shapes)), list(map(prod, shapes))
        self.keys = values = torch.empty(batch, sum(key_lengths), dim, dtype=dtype, device=device)
        if not latent:
            values = torch.empty(batch, sum(lengths), dim, dtype=dtype, device=device)
        self.values = values
        self.positions = torch.empty(batch, sum(lengths), dtype=torch.int32, device=device)
        held = self.keys.split(key_lengths, 1), self.values.split(lengths, 1)
        self.head_groups: list[KVHeadGroup] = []
        for (heads, capacity), segment, shape, key_shape, keys, values, positions in zip(
            sizes,
            segments,
            shapes,
            key_shapes,
            *held,
            self.positions.split(lengths, 1),
            strict=True,
        ):
            keys = keys.unflatten(1, key_shape)
            values = keys if latent else values.unflatten(1, shape)
            group = KVHeadGroup(heads, keys, values, positions.unflatten(1, shape))
            group.segment, group.capacity = segment, capacity
            group.used = group.segment_len
            if decode_rows:
                size = batch, len(heads), decode_rows, capacity
                group.rows = torch.zeros(size, device=device)
            self.head_groups.append(group)

    @classmethod
    def empty(
        cls, size: KVSize, *, dtype: torch.dtype, device: torch.device, batch: int = 1
    ) -> "LayerCache":
        """An empty layer of this size."""
        return cls(
            [(tuple(range(size.heads)), 0)],
            batch=batch,
            dim=size.dim,
            dtype=dtype,
            device=device,
            latent=size.latent,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held, filled or not: keys, values, positions, remembered rows, segments."""
        held = [self.keys, self.values, self.positions]
        for each in self.head_groups:
            held += () if each.rows is None else (each.rows,)
            held += () if each.segment is None else each.segment.tensors
        return held

    @property
    def views(self) -> list[Tensor]:
        """What its head groups see of the flat buffers, and the storage that segments are the
        beginning of."""
        seen = [view for head_group in self.head_groups for view in head_group.residuals]
        for storage in (head_group.storage for head_group in self.head_groups):
            seen += () if storage is None else storage.tensors
        return seen

    @property
    def latent(self) -> bool:
        """Whether an entry is one vector, its key and its value."""
        return self.values is self.keys

    @property
    def head_alias(self) -> dict[int, int]:
        """KV heads that hold nothing, and for each the head whose attention output it takes."""
        return {head: to for each in self.head_groups for head, to in each.head_alias.items()}

    @property
    def kv_heads(self) -> int:
        """The number of KV heads, those with an alias included."""
        return sum(len(each.heads) + len(each.head_alias) for each in self.head_groups)

    @property
    def nbytes(self) -> int:
        """Bytes of storage held, filled or not, what it shares with another layer included."""
        return bytes_held(self.tensors)

    @property
    def computed(self) -> bool:
        """Whether some of its entries are computed on reading, and cannot be overwritten."""
        return any(each.segment is not None and not each.packed for each in self.head_groups)

    @property
    def shares_keys(self) -> bool:
        """Whether some of its heads have no keys of their own."""
        return any(head_group.shares_keys for head_group in self.head_groups)

    @property
    def uniform(self) -> bool:
        """Whether all heads hold equally many entries, each with its own keys."""
        first, *others = self.head_groups
        return not (others or first.head_alias or first.shares_keys)

    @property
    def packed(self) -> bool:
        """Whether some of its entries are quantized."""
        return any(each.packed is not None for each in self.head_groups)

    @property
    def lengths(self) -> list[GroupLength]:
        """What each head group holds."""
        return [(len(head_group.heads), head_group.used) for head_group in self.head_groups]

    @property
    def residual_lengths(self) -> list[GroupLength]:
        """What each head group holds in its own slots, its segment left out."""
        return [(len(head_group.heads), head_group.residual_len) for head_group in self.head_groups]

    @property
    def rows(self) -> int:
        """Attention rows its head groups remember."""
        rows = self.head_groups[0].rows
        return 0 if rows is None else rows.shape[2]

    @property
    def entries_mean(self) -> float:
        """Entries held, on average over the KV heads."""
        first, *others = self.head_groups
        if not others and not first.head_alias:  # as mostly, and it is asked with every token
            return float(first.used)
        return sum(heads * used for heads, used in self.lengths) / self.kv_heads

    def resized(
        self,
        capacities: Iterable[int],
        decode_rows: int = 0,
        bits: KVBits | None = None,
        *,
        exact_room: bool = False,
        remember_packed: bool = False,
        prepare: Callable[["LayerCache"], None] | None = None,
    ) -> "LayerCache":
        """A copy with head groups of `capacities` slots, entries ascending in position. Segments
        that never change are shared with it; what is quantized is written out, or with `bits`
        stays so, and what is no longer recent joins it; the rest as in `gathered`."""
        ordered = [Selection.everything(each) for each in self.head_groups]
        segments = [each.segment for each in self.head_groups] if self.computed else None
        return LayerCache.gathered(
            *(ordered, capacities, decode_rows, segments, bits),
            exact_room=exact_room,
            remember_packed=remember_packed,
            prepare=prepare,
        )

    def behind(self, segments: Sequence[CompressedSegment], room: int) -> "LayerCache":
        """A layer of the same heads that holds `segments`, one a head group, and `room` free
        slots."""
        capacities = [segment.positions.shape[2] + room for segment in segments]
        return self.empty_like(capacities, segments=segments)

    def empty_like(
        self,
        capacities: Iterable[int],
        *,
        decode_rows: int = 0,
        segments: Sequence[CompressedSegment | None] | None = None,
        device: torch.device | None = None,
    ) -> "LayerCache":
        """A layer of the same heads in head groups of `capacities` slots, which holds no more than
        `segments`."""
        groups = self.head_groups
        made = LayerCache(
            [(each.heads, size) for each, size in zip(groups, capacities, strict=True)],
            batch=self.keys.shape[0],
            dim=self.keys.shape[2],
            dtype=self.keys.dtype,
            device=device or self.keys.device,
            decode_rows=decode_rows,
            segments=segments,
            latent=self.latent,
            sharing=[each.shares_keys for each in groups],
        )
        for head_group, before in zip(made.head_groups, groups, strict=True):
            head_group.head_alias = before.head_alias
        return made

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> None:
        """Write one entry a KV head, `(1, heads, 1, dim)`, to slots of the flat buffers `(heads,)`,
        at a position `(1,)` that is on the device. It does not count yet."""
        if has_triton(keys.device):
            from kvlite.ops.triton_write import write_token

            into = self.keys, self.values, self.positions
            write_token(keys[:, :, 0], values[:, :, 0], position, into, slots)
            return
        self.keys.index_copy_(1, slots, keys[:, :, 0])
        self.values.index_copy_(1, slots, values[:, :, 0])
        self.positions.index_copy_(1, slots, position.int().expand(1, len(slots)))

    def in_order(self, each: Sequence[Tensor]) -> Tensor:
        """One tensor a head group, `(batch, heads of the group, ...)`, as one with the layer's
        KV heads in order, no head missing; of a single head group the one itself."""
        if len(each) == 1:
            return each[0]
        lines = {
            head: part[:, row]
            for head_group, part in zip(self.head_groups, each, strict=True)
            for row, head in enumerate(head_group.heads)
        }
        return torch.stack([lines[head] for head in sorted(lines)], 1)

    def last(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the entries appended last, `(batch, KV heads, count, dim)`, and their
        positions `(count,)`; where they lie, if that is one head group."""
        assert all(head_group.residual_len >= count for head_group in self.head_groups)
        keys, values, positions = zip(
            *(
                [own.narrow(2, each.residual_len - count, count) for own in each.residuals]
                for each in self.head_groups
            ),
            strict=True,
        )
        return self.in_order(keys), self.in_order(values), positions[0][0, 0]

    def scores(self) -> Tensor:
        """The attention recorded by its head groups, KV heads in order."""
        return self.in_order([head_group.scores() for head_group in self.head_groups])

    def clear_rows(self) -> None:
        """Drop the attention recorded by its head groups."""
        for head_group in self.head_groups:
            if head_group.rows is not None:
                head_group.rows.zero_()

    def mark(self) -> list[Mark]:
        """The present state, for `rewind`."""
        return [
            Mark(
                head_group.used,
                None if head_group.rows is None else head_group.rows.clone(),
                head_group.history_index,
            )
            for head_group in self.head_groups
        ]

    def rewind(self, marks: Iterable[Mark]) -> None:
        """Drop everything appended since the mark, maybe of a layer with more or fewer slots."""
        for head_group, mark in zip(self.head_groups, marks, strict=True):
            head_group.used, head_group.history_index = mark.used, mark.history_index
            if head_group.rows is not None and mark.rows is not None:
                head_group.rows.zero_()
                head_group.rows[..., : mark.used] = mark.rows[..., : mark.used]

    @staticmethod
    def gathered(
        selections: Iterable[Selection],
        capacities: Iterable[int],
        decode_rows: int = 0,
        segments: Sequence[CompressedSegment | None] | None = None,
        bits: KVBits | None = None,
        *,
        exact_room: bool = False,
        remember_packed: bool = False,
        prepare: Callable[["LayerCache"], None] | None = None,
    ) -> "LayerCache":
        """A new layer that holds only what `selections` name, in head groups of `capacities` slots.

        The entries are copied, so the storage they came from can be freed; all but those of
        `segments`, which the selections of these head groups begin with.

        Args:
            bits: quantize those between the first few and the recent ones, straight from where
                they are. A few slots are free for exact entries then, and storage for those that
                later join what is quantized; head groups of which nothing is yet get no more.
            exact_room: with `bits`, let all free slots be for exact entries.
            remember_packed: keep the quantized source of restored entries in memory, until a cut
                quantizes them again.
            prepare: called with the new layer before it is filled.
        """
        chosen, capacities, own = list(selections), list(capacities), None
        if segments is None and bits is not None:
            rooms = [size - each.length[1] for each, size in zip(chosen, capacities, strict=True)]
            packed = [
                selection.packed(bits, 0 if exact_room else room)
                for selection, room in zip(chosen, rooms, strict=True)
            ]
            if not exact_room:
                free = [min(room, bits.at_once) for room in rooms]
                kept = [selection.length[1] for selection in chosen]
                own = [
                    entries - (0 if each is None else each.count) + slots
                    for entries, each, slots in zip(kept, packed, free, strict=True)
                ]
                capacities = [
                    size if each is not None else slots
                    for size, each, slots in zip(capacities, packed, own, strict=True)
                ]
            segments = packed
        sizes = [(each.kv_heads, size) for each, size in zip(chosen, capacities, strict=True)]
        keys = chosen[0].source.residual_keys
        layer = LayerCache(
            sizes,
            batch=keys.shape[0],
            dim=keys.shape[3],
            dtype=keys.dtype,
            device=keys.device,
            decode_rows=decode_rows,
            segments=segments,
            latent=chosen[0].source.latent,
            sharing=[selection.shares_keys for selection in chosen],
            own=own,
        )
        if prepare is not None:
            prepare(layer)
        for selection, head_group in zip(chosen, layer.head_groups, strict=True):
            selection.copy_to(head_group, remember_packed=remember_packed)
        return layer
