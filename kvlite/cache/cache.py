"""The KV cache: flat, ragged storage a layer, true bytes, no write past its end."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.cache.bank import Bank
from kvlite.cache.front import Front, bytes_held
from kvlite.errors import InterruptedCacheError

Line = tuple[int, int]
"""How many KV heads a bank has, and the entries each of them holds."""


@dataclass(frozen=True)
class Selection:
    """What some KV heads of a bank keep: equally many entries a head.

    Attributes:
        source: the bank that holds the entries now.
        slots: `(batch, heads, kept)` int64, ascending in position along the last dimension.
        heads: which heads of `source`, as indices into `source.heads`; None for all of them.
        votes: `(batch, heads, kept)` float32, what they were chosen by, if that is still needed.
    """

    source: Bank
    slots: Tensor
    heads: tuple[int, ...] | None = None
    votes: Tensor | None = None

    @property
    def line(self) -> Line:
        """What will be held of it."""
        return self.slots.shape[1], self.slots.shape[2]

    def without(self, dropped: Collection[int]) -> "Selection | None":
        """The same for the KV heads of the layer that are not dropped; None if no head is left."""
        own = self.heads or tuple(range(len(self.source.heads)))
        rows = [row for row, i in enumerate(own) if self.source.heads[i] not in dropped]
        if len(rows) == len(own):
            return self
        votes = None if self.votes is None else self.votes[:, rows]
        heads = tuple(own[row] for row in rows)
        return Selection(self.source, self.slots[:, rows], heads, votes) if rows else None

    @classmethod
    def everything(cls, bank: Bank) -> "Selection":
        """All of a bank, in order."""
        return cls(bank, bank.positions[:, :, : bank.used].argsort(dim=-1))


@dataclass(frozen=True)
class Mark:
    """How far a bank was filled, and the rows it remembered."""

    used: int
    rows: Tensor | None
    newest_row: int


def _gather(tensor: Tensor, slots: Tensor) -> Tensor:
    """Pick `slots` (batch, heads, k) from `tensor` (batch, heads, capacity, dim)."""
    return tensor.gather(2, slots[..., None].expand(-1, -1, -1, tensor.shape[-1]))


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
    def nbytes(self) -> int:
        """Bytes of storage held, filled or not, what it shares with another layer included."""
        return bytes_held(self.tensors)

    @property
    def computed(self) -> bool:
        """Whether some of its entries are computed on reading, and so cannot be overwritten."""
        return any(bank.front is not None for bank in self.banks)

    @property
    def lines(self) -> list[Line]:
        """What each bank holds."""
        return [(len(bank.heads), bank.used) for bank in self.banks]

    @property
    def own_lines(self) -> list[Line]:
        """What each bank holds in its own slots, its front left out."""
        return [(len(bank.heads), bank.used - bank.first_own) for bank in self.banks]

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

    def resized(self, capacities: Iterable[int], decode_rows: int = 0) -> "LayerCache":
        """A copy with banks of `capacities` slots, entries ascending in position; fronts, which
        never change, are shared with it."""
        ordered = [Selection.everything(bank) for bank in self.banks]
        fronts = [bank.front for bank in self.banks]
        return LayerCache.gathered(ordered, capacities, decode_rows, fronts, self.like)

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
    ) -> "LayerCache":
        """A new layer that holds only what `selections` name, in banks of `capacities` slots.

        The entries are copied, so the storage they came from is free as soon as it is let go; but
        those of `fronts`, which the selections of these banks begin with.
        """
        chosen = list(selections)
        sizes = [
            (
                s.source.heads if s.heads is None else tuple(s.source.heads[i] for i in s.heads),
                capacity,
            )
            for s, capacity in zip(chosen, capacities, strict=True)
        ]
        keys = chosen[0].source.keys
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
        for selection, bank in zip(chosen, layer.banks, strict=True):
            _copy(selection, bank)
        return layer


def _copy(selection: Selection, bank: Bank) -> None:
    source, slots = selection.source, selection.slots
    pick = slice(None) if selection.heads is None else list(selection.heads)
    bank.used, bank.votes = slots.shape[2], selection.votes
    written, own = slice(0, bank.used - bank.first_own), slots[:, :, bank.first_own :]
    bank.own_keys[:, :, written] = _gather(source.keys[:, pick], own)
    bank.own_values[:, :, written] = _gather(source.values[:, pick], own)
    bank.own_positions[:, :, written] = source.positions[:, pick].gather(2, own)
    if bank.rows is None or source.rows is None:
        return
    if bank.rows.shape[2] == source.rows.shape[2]:
        index = slots[:, :, None].expand(-1, -1, source.rows.shape[2], -1)
        bank.rows[..., : bank.used] = source.rows[:, pick].gather(3, index)
        bank.newest_row = source.newest_row


@dataclass
class KVCache:
    """All layers, and how many tokens they have seen.

    Attributes:
        layers: one `LayerCache` a layer of the model.
        seen: tokens read or generated so far; the next token's position.
        rehearsed: of these, how many were repeated since they were read, for methods that judge
            by that.
        writing: a decode step has begun and not ended.
    """

    layers: list[LayerCache]
    seen: int = 0
    rehearsed: int = 0
    writing: bool = False

    @classmethod
    def empty(
        cls,
        layers: int,
        kv_heads: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch: int = 1,
    ) -> "KVCache":
        """A cache that has seen nothing."""
        sizes = [(tuple(range(kv_heads)), 0)]
        return cls(
            [
                LayerCache(sizes, batch=batch, dim=dim, dtype=dtype, device=device)
                for _ in range(layers)
            ]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of storage held by all layers, filled or not; what layers share counts once."""
        return bytes_held(tensor for layer in self.layers for tensor in layer.tensors)

    @property
    def entries_mean(self) -> float:
        """Entries held, on average over layers and KV heads."""
        return sum(layer.entries_mean for layer in self.layers) / len(self.layers)

    def require_whole(self) -> None:
        """Raises InterruptedCacheError if the last step never ended, so that layers disagree."""
        if self.writing:
            raise InterruptedCacheError(
                "an interrupted step left this conversation's cache half written: "
                "start a new conversation"
            )
