"""One layer's entries: flat, ragged storage, true bytes, no write past its end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.cache.bank import Bank
from kvlite.cache.bits import KVBits
from kvlite.cache.front import Front, bytes_held
from kvlite.cache.selection import Line, Selection


@dataclass(frozen=True)
class Mark:
    """How far a bank was filled, and the rows it remembered."""

    used: int
    rows: Tensor | None
    newest_row: int


class LayerCache:
    """One layer's entries: flat buffers of `total` slots a sequence, and banks that view them.

    Each KV head owns a run of slots; heads of equal capacity lie together as one `Bank`.

    Attributes:
        keys, values: `(batch, total, dim)` flat storage.
        positions: `(batch, total)` int32.
        banks: views of it, in order of their offset.
        like: KV heads that hold nothing, and for each the head whose attention output it takes.
        tensors: all that is held, filled or not: keys, values, positions, remembered rows, fronts.
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
        fronts: Sequence[Front | None] | None = None,
        like: Mapping[int, int] | None = None,
    ) -> None:
        """Allocate room for `sizes`: (KV heads, slots a head) for each bank, the slots of its
        front included."""
        before = fronts or [None] * len(sizes)
        own = [
            capacity if front is None else capacity - front.positions.shape[2]
            for (_, capacity), front in zip(sizes, before, strict=True)
        ]
        total = sum(len(heads) * slots for (heads, _), slots in zip(sizes, own, strict=True))
        self.keys = torch.empty(batch, total, dim, dtype=dtype, device=device)
        self.values = torch.empty(batch, total, dim, dtype=dtype, device=device)
        self.positions = torch.empty(batch, total, dtype=torch.int32, device=device)
        self.banks: list[Bank] = []
        self.like = dict(like or {})
        offset = 0
        for (heads, capacity), slots, front in zip(sizes, own, before, strict=True):
            span = slice(offset, offset + len(heads) * slots)
            shape = (batch, len(heads), slots)
            rows = None
            if decode_rows:
                rows = torch.zeros(batch, len(heads), decode_rows, capacity, device=device)
            self.banks.append(
                Bank(
                    heads=heads,
                    own_keys=self.keys[:, span].view(*shape, dim),
                    own_values=self.values[:, span].view(*shape, dim),
                    own_positions=self.positions[:, span].view(shape),
                    rows=rows,
                    front=front,
                    used=capacity - slots,
                )
            )
            offset = span.stop
        self.tensors = [self.keys, self.values, self.positions]
        self.tensors += [bank.rows for bank in self.banks if bank.rows is not None]
        self.tensors += [
            tensor for front in before if front is not None for tensor in front.tensors
        ]

    @property
    def views(self) -> list[Tensor]:
        """What its banks see of the flat buffers."""
        return [
            view
            for bank in self.banks
            for view in (bank.own_keys, bank.own_values, bank.own_positions)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of storage held, filled or not, what it shares with another layer included."""
        return bytes_held(self.tensors)

    @property
    def computed(self) -> bool:
        """Whether some of its entries are computed on reading, and cannot be overwritten."""
        return any(bank.front is not None and bank.front.fixed for bank in self.banks)

    @property
    def packed(self) -> bool:
        """Whether some of its entries are quantized, each by itself."""
        return any(bank.front is not None and not bank.front.fixed for bank in self.banks)

    @property
    def lines(self) -> list[Line]:
        """What each bank holds."""
        return [(len(bank.heads), bank.used) for bank in self.banks]

    @property
    def own_lines(self) -> list[Line]:
        """What each bank holds in its own slots, its front left out."""
        return [(len(bank.heads), bank.own_used) for bank in self.banks]

    @property
    def rows(self) -> int:
        """Attention rows its banks remember."""
        rows = self.banks[0].rows
        return 0 if rows is None else rows.shape[2]

    @property
    def entries_mean(self) -> float:
        """Entries held, on average over the KV heads."""
        heads = sum(len(bank.heads) for bank in self.banks) + len(self.like)
        return sum(len(bank.heads) * bank.used for bank in self.banks) / heads

    def resized(
        self,
        capacities: Iterable[int],
        decode_rows: int = 0,
        bits: KVBits | None = None,
        *,
        origins: bool = False,
        prepare: Callable[["LayerCache"], None] | None = None,
    ) -> "LayerCache":
        """A copy with banks of `capacities` slots, entries ascending in position. Fronts that never
        change are shared with it; what is quantized is written out, or with `bits` stays so, and
        what is no longer recent joins it; `origins` and `prepare` as in `gathered`."""
        ordered = [Selection.everything(bank) for bank in self.banks]
        fronts = [bank.front for bank in self.banks] if self.computed else None
        return LayerCache.gathered(
            ordered,
            capacities,
            decode_rows,
            fronts,
            self.like,
            bits,
            origins=origins,
            prepare=prepare,
        )

    def behind(self, fronts: Sequence[Front], room: int) -> "LayerCache":
        """A layer of the same heads that holds `fronts`, one a bank, and `room` free slots."""
        return LayerCache(
            [
                (bank.heads, front.positions.shape[2] + room)
                for bank, front in zip(self.banks, fronts, strict=True)
            ],
            batch=self.keys.shape[0],
            dim=self.keys.shape[2],
            dtype=self.keys.dtype,
            device=self.keys.device,
            fronts=fronts,
            like=self.like,
        )

    def in_order(self, each: Sequence[Tensor]) -> Tensor:
        """One tensor a bank, `(batch, heads of the bank, ...)`, as one with the layer's KV heads
        in order, no head missing; of a single bank the one itself."""
        if len(each) == 1:
            return each[0]
        lines = {
            head: part[:, row]
            for bank, part in zip(self.banks, each, strict=True)
            for row, head in enumerate(bank.heads)
        }
        return torch.stack([lines[head] for head in sorted(lines)], 1)

    def last(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the entries appended last, `(batch, KV heads, count, dim)`, and their
        positions `(count,)`; where they lie, if that is one bank."""
        assert all(bank.own_used >= count for bank in self.banks)
        parts = [slice(bank.own_used - count, bank.own_used) for bank in self.banks]
        own = list(zip(self.banks, parts, strict=True))
        keys = self.in_order([bank.own_keys[:, :, part] for bank, part in own])
        values = self.in_order([bank.own_values[:, :, part] for bank, part in own])
        return keys, values, self.banks[0].own_positions[0, 0, parts[0]]

    def clear_rows(self) -> None:
        """Forget what its banks remember of attention."""
        for bank in self.banks:
            if bank.rows is not None:
                bank.rows.zero_()

    def mark(self) -> list[Mark]:
        """How it stands, for `rewind`."""
        return [
            Mark(bank.used, None if bank.rows is None else bank.rows.clone(), bank.newest_row)
            for bank in self.banks
        ]

    def rewind(self, marks: Iterable[Mark]) -> None:
        """Forget what was appended since."""
        for bank, mark in zip(self.banks, marks, strict=True):
            bank.used, bank.newest_row = mark.used, mark.newest_row
            if bank.rows is not None and mark.rows is not None:
                bank.rows.copy_(mark.rows)

    @staticmethod
    def gathered(
        selections: Iterable[Selection],
        capacities: Iterable[int],
        decode_rows: int = 0,
        fronts: Sequence[Front | None] | None = None,
        like: Mapping[int, int] | None = None,
        bits: KVBits | None = None,
        *,
        origins: bool = False,
        prepare: Callable[["LayerCache"], None] | None = None,
    ) -> "LayerCache":
        """A new layer that holds only what `selections` name, in banks of `capacities` slots.

        The entries are copied, so the storage they came from is free as soon as it is let go; but
        those of `fronts`, which the selections of these banks begin with.

        Args:
            bits: quantize those between the first few and the recent ones, straight from where
                they are.
            origins: remember where what is written out was packed; only until a cut that packs it
                again, since all of it stays in memory for as long.
            prepare: given the new layer before it is filled.
        """
        chosen = list(selections)
        if fronts is None and bits is not None:
            fronts = [selection.packed(bits) for selection in chosen]
        sizes = [(each.kv_heads, size) for each, size in zip(chosen, capacities, strict=True)]
        keys = chosen[0].source.own_keys
        layer = LayerCache(
            sizes,
            batch=keys.shape[0],
            dim=keys.shape[3],
            dtype=keys.dtype,
            device=keys.device,
            decode_rows=decode_rows,
            fronts=fronts,
            like=like,
        )
        if prepare is not None:
            prepare(layer)
        for selection, bank in zip(chosen, layer.banks, strict=True):
            selection.copy_to(bank, origins=origins)
        return layer
