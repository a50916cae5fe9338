"""Recall: at every step of an answer, entries that its token wants come back into the cache.

In two stages. An index on the device estimates the attention that every entry would get, and names
several times as many candidates as are wanted. Their keys, fetched from the host store, give exact
attention. Wanted entries that are not in the cache replace the least wanted ones there."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup
from kvlite.cache.packed import Packed
from kvlite.cache.quantized import has_compiled
from kvlite.offload.kv.store import HostKVStore
from kvlite.offload.kv.swap import CANDIDATES, RECENT, SINKS, swap_in, swap_in_place


@dataclass
class Recall:
    """Recall from a host store during one answer.

    Attributes:
        entries: how many each token may want per KV head, besides the first few and the recent
            ones; 0 for none.
        wanted: entries that tokens wanted so far, over all layers and KV heads.
    """

    store: HostKVStore
    entries: int
    wanted: int = 0
    _known: int = field(default=0, init=False)
    _counted: Tensor | None = field(default=None, init=False)

    @property
    def brought(self) -> int:
        """How many of `wanted` had to be brought back; waits for a device that counts."""
        return self._known + (0 if self._counted is None else int(self._counted))

    def reaches(self, layer: int, head_group: KVHeadGroup) -> bool:
        """Whether a head group lacks entries, and may replace its own with them."""
        source, segment = self.store.layers[layer], head_group.segment
        tied = segment is not None and (
            segment.fixed or (isinstance(segment, Packed) and segment.bits.by_channel)
        )
        more = source.index is not None and head_group.used < source.head_group.used
        return more and not tied and self._count(head_group) > SINKS + RECENT

    def _count(self, head_group: KVHeadGroup) -> int:
        return min(self.entries + SINKS + RECENT, head_group.used) if self.entries else 0

    def scores(self, layer: int, queries: Tensor) -> Tensor:
        """Estimated attention of queries `(batch, kv heads, rows, dim)` float32, scaled, to
        everything a layer has read, `(batch, kv heads, n)` float32."""
        source = self.store.layers[layer]
        assert source.index is not None
        return source.index.scores(queries, source.head_group.used)

    def bring_back(
        self, layer: int, head_group: KVHeadGroup, queries: Tensor, scores: Tensor
    ) -> None:
        """Bring the entries that one token wants most into a head group that `reaches`.

        On CUDA, if all is exact, this waits for the device at most once, and never if it reads the
        host's memory by itself.

        Args:
            scores: from `scores`, of all KV heads.
        """
        if queries.is_meta:  # takes next to no memory
            return
        source, transfer = self.store.layers[layer].head_group, self.store.transfer
        count = self._count(head_group)
        plain = _plain(head_group, source)
        if plain and _compiles(head_group, len(queries)):
            self._known += _swap_in_compiled(head_group, queries[0], scores[0], source, count)
        elif plain and transfer is not None:
            if self._counted is None:
                self._counted = torch.zeros((), dtype=torch.int64, device=queries.device)
            own = _of_heads(scores, head_group.heads)
            self._counted += swap_in_place(head_group, queries, own, source, count, transfer.fetch)
        else:
            if transfer is not None:
                transfer.wait()
            self._known += swap_in(
                head_group, queries, _of_heads(scores, head_group.heads), source, count
            )
        self.wanted += count * len(head_group.heads) * queries.shape[0]


def _of_heads(scores: Tensor, heads: tuple[int, ...]) -> Tensor:
    """The scores `(batch, kv heads, n)` of some heads; indexing by a list would wait."""
    if heads == tuple(range(scores.shape[1])):
        return scores
    return torch.stack([scores[:, head] for head in heads], 1)


def _plain(head_group: KVHeadGroup, source: KVHeadGroup) -> bool:
    """Whether all is exact, and places in the source are positions."""
    return (
        head_group.segment is None
        and source.segment is None
        and int(source.residual_positions[0, 0, source.used - 1]) == source.used - 1
    )


def _compiles(head_group: KVHeadGroup, batch: int) -> bool:
    """Whether the compiled loop handles a plain head group: one sequence on a CPU, in float32."""
    return (
        has_compiled(head_group.residual_keys.device)
        and batch == 1
        and head_group.residual_keys.dtype == torch.float32
        and head_group.rows is None
    )


def _swap_in_compiled(
    head_group: KVHeadGroup, queries: Tensor, scores: Tensor, source: KVHeadGroup, count: int
) -> int:
    """`swap_in` for one sequence, compiled."""
    from kvlite.ops import numba_recall as compiled

    everything = source.residual_keys[0].numpy(), source.residual_values[0].numpy()
    held = (
        head_group.residual_keys[0],
        head_group.residual_values[0],
        head_group.residual_positions[0],
    )
    came: int = compiled.fill(
        queries.contiguous().numpy(),
        scores.numpy(),
        np.array(head_group.heads),
        everything,
        tuple(each.numpy() for each in held),
        head_group.used,
        count,
        CANDIDATES * count,
        SINKS,
        RECENT,
    )
    return came
