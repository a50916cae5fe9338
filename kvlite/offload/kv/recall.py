"""Recall: each step of an answer fetches the entries that its token needs back into the cache.

This takes two stages. An index on the device estimates the attention that every entry would get,
and names several times as many candidates as are wanted. The candidates' keys, fetched from the
host store, give exact attention. Wanted entries that are not in the cache replace the least wanted
ones there."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup
from kvlite.offload.kv.store import HostKVStore
from kvlite.offload.kv.swap import (
    CANDIDATES,
    RECENT,
    SINKS,
    RecallQuery,
    copy_in,
    in_front,
    places_in,
    swap_in,
    swap_in_place,
)
from kvlite.offload.kv.transfer import KVTransfer
from kvlite.ops.device import has_compiled


@dataclass
class Recall:
    """Recall from a host store during one answer.

    Attributes:
        entries: how many entries each token may want per KV head, besides the first few and the
            recent ones; 0 for none.
        num_requested: entries that were wanted so far, over all tokens, layers and KV heads.
    """

    store: HostKVStore
    entries: int
    num_requested: int = 0
    _known: int = field(default=0, init=False)
    _counted: dict[torch.device, Tensor] = field(default_factory=dict, init=False)

    @property
    def num_fetched(self) -> int:
        """How many of `wanted` had to be fetched; waits for the device if it counts them."""
        return self._known + sum(map(int, self._counted.values()))

    def reaches(self, layer: int, head_group: KVHeadGroup) -> bool:
        """Whether a head group lacks entries, and may swap its own for them."""
        source = self.store.layers[layer]
        more = source.index is not None and head_group.used < source.head_group.used
        return more and self.wants(head_group)

    def wants(self, head_group: KVHeadGroup) -> bool:
        """Whether a head group may replace entries with others."""
        free = head_group.by_entry and not head_group.shares_keys
        return free and self.count(head_group.used) > SINKS + RECENT

    def count(self, held: int) -> int:
        """How many entries a token wants in a head group that holds so many, including the first
        few and the recent ones."""
        return min(self.entries + SINKS + RECENT, held) if self.entries else 0

    def counter(self, device: torch.device) -> Tensor:
        """The counter of fetched entries on a device, int64."""
        if device not in self._counted:
            self._counted[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._counted[device]

    def scores(self, layer: int, queries: Tensor, scale: float = 1.0) -> Tensor:
        """Estimated attention of queries `(batch, kv heads, rows, dim)`, multiplied by `scale`, to
        everything a layer has read, `(batch, kv heads, n)` float32."""
        source = self.store.layers[layer]
        assert source.index is not None
        return source.index.scores(queries, source.head_group.used, scale)

    def bring_back(
        self,
        layer: int,
        head_group: KVHeadGroup,
        queries: Tensor,
        scores: Tensor,
        scale: float = 1.0,
    ) -> None:
        """Fetch the entries that one token wants most into a head group that `reaches`.

        On CUDA this waits for the device at most once if everything is exact, and never if the
        device reads host memory itself.

        Args:
            queries: of the head group's heads.
            scores: from `scores`, of all KV heads.
            scale: as for `scores`.
        """
        if queries.is_meta:  # takes next to no memory
            return
        source = self.store.layers[layer].head_group
        transfer = self.store.transfers.get(queries.device)
        count, ordered = self.count(head_group.used), is_ordered(source)
        query = RecallQuery(queries, scale, scores, source, count)
        if ordered and len(queries) == 1 and _compiles(head_group) and _compiles(source):
            self._known += _swap_in_compiled(head_group, query)
        elif ordered and transfer is not None and _in_place(head_group, source, transfer):
            swap_in_place(head_group, query, transfer, self.counter(queries.device))
        else:
            if transfer is not None:
                transfer.wait()
            self._known += swap_in(head_group, query)
        self.num_requested += count * len(head_group.heads) * queries.shape[0]

    def return_to(self, layer: int, head_group: KVHeadGroup, positions: Tensor) -> None:
        """Exchange entries of a head group for those that it held before, of these positions
        `(batch, heads, slots)`."""
        gone = head_group.positions[:, :, : positions.shape[2]] != positions
        if not gone.any():
            return
        source = self.store.layers[layer].head_group
        self.store.wait()
        comes, slots = in_front(gone)
        most = int(comes.sum(-1).max())
        comes, slots = comes[:, :, :most], slots[:, :, :most]
        copy_in(head_group, source, places_in(source, positions).gather(2, slots), slots, comes)

    def counted(self, num_requested: int, num_fetched: int) -> list[tuple[object, str, object]]:
        """The attributes after counting more entries that a token wanted, and fetched, over KV
        heads."""
        requested, fetched = self.num_requested + num_requested, self._known + num_fetched
        return [(self, "num_requested", requested), (self, "_known", fetched)]


def is_ordered(source: KVHeadGroup) -> bool:
    """Whether places in the source are positions."""
    last = source.residual_positions.numpy()[0, 0, source.residual_len - 1]
    return bool(last == source.used - 1)


def _in_place(head_group: KVHeadGroup, source: KVHeadGroup, transfer: KVTransfer) -> bool:
    exact = head_group.segment is None and source.segment is None
    return exact or (head_group.has_kernels and transfer.reads(source))


def _compiles(head_group: KVHeadGroup) -> bool:
    keys = head_group.residual_keys
    return has_compiled(keys.device) and keys.dtype == torch.float32 and head_group.has_kernels


def _swap_in_compiled(head_group: KVHeadGroup, query: RecallQuery) -> int:
    from kvlite.ops.numba_recall import fill

    asked, remembered = query.queries.float() * query.scale, head_group.rows
    given = np.ascontiguousarray(asked.numpy()[0]), query.scores.numpy()[0]
    both = np.array(head_group.heads), _arrays(query.source), _arrays(head_group)
    rows = _NOTHING if remembered is None else remembered.numpy()[0]
    sizes = head_group.used, query.count, CANDIDATES * query.count, SINKS, RECENT
    num_fetched: int = fill(*given, *both, rows, *sizes)
    return num_fetched


_NOTHING = np.empty((0, 0, 0), np.float32)


def _arrays(head_group: KVHeadGroup) -> tuple[Any, ...]:
    packed, own = head_group.packed, tuple(each.numpy()[0] for each in head_group.residuals)
    if packed is None:
        return own, _none_packed(len(head_group.heads)), (0, 0, 0)
    return own, packed.arrays(), (packed.start, packed.keys.bits, packed.values.bits)


@cache
def _none_packed(heads: int) -> tuple[Any, ...]:
    """What `Packed.arrays` gives of no entries."""
    codes, halves = np.empty((heads, 0, 0), np.uint8), np.empty((heads, 0, 0), np.uint16)
    positions, mean = np.empty((heads, 0), np.int32), np.empty((heads, 0), np.float32)
    return codes, halves, halves, codes, halves, halves, positions, mean, 0
