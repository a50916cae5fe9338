"""At every step of an answer: entries that its token wants come back into the cache.

Two stages. An index on the device says roughly what attention every entry would get, and names
several times as many candidates as are wanted; their keys, fetched from the tier, say it exactly.
What is wanted and not in the cache takes the place of what is least wanted there.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvlite.cache import Bank
from kvlite.cache.packed import Packed
from kvlite.cache.quantized import has_compiled
from kvlite.offload.kv.store import Tier
from kvlite.offload.kv.swap import CANDIDATES, RECENT, SINKS, swap_in, swap_in_place


@dataclass
class Recall:
    """What an answer recalls from, and what it did.

    Attributes:
        entries: how many a KV head that each token may bring back, those that are there already
            included, beside the first few and the recent ones; 0 for none.
        wanted: entries that tokens wanted so far, over all layers and KV heads.
    """

    tier: Tier
    entries: int
    wanted: int = 0
    _known: int = field(default=0, init=False)
    _counted: Tensor | None = field(default=None, init=False)

    @property
    def brought(self) -> int:
        """How many of these had to be brought back. A device that counts is waited for."""
        return self._known + (0 if self._counted is None else int(self._counted))

    def reaches(self, layer: int, bank: Bank) -> bool:
        """Whether entries of a bank may give way to others that it has not."""
        source, front = self.tier.layers[layer], bank.front
        tied = front is not None and (
            front.fixed or (isinstance(front, Packed) and front.bits.by_channel)
        )
        more = source.index is not None and bank.used < source.bank.used
        return more and not tied and self._count(bank) > SINKS + RECENT

    def _count(self, bank: Bank) -> int:
        return min(self.entries + SINKS + RECENT, bank.used) if self.entries else 0

    def scores(self, layer: int, queries: Tensor) -> Tensor:
        """Roughly the attention that queries `(batch, kv heads, rows, dim)` float32, scaled, pay
        to everything a layer has read, `(batch, kv heads, n)` float32."""
        source = self.tier.layers[layer]
        assert source.index is not None
        return source.index.scores(queries, source.bank.used)

    def bring_back(self, layer: int, bank: Bank, queries: Tensor, scores: Tensor) -> None:
        """Let a bank that is reached hold what one token wants most; `scores` are those of all KV
        heads. The device is waited for once at most where all is exact and on CUDA, not at all
        where that reads the host's memory by itself."""
        if queries.is_meta:  # it takes next to nothing
            return
        source, count, ferry = self.tier.layers[layer].bank, self._count(bank), self.tier.ferry
        plain = _plain(bank, source)
        if plain and _compiles(bank, len(queries)):
            self._known += _swap_in_compiled(bank, queries[0], scores[0], source, count)
        elif plain and ferry is not None:
            if self._counted is None:
                self._counted = torch.zeros((), dtype=torch.int64, device=queries.device)
            own = _of_heads(scores, bank.heads)
            self._counted += swap_in_place(bank, queries, own, source, count, ferry.fetch)
        else:
            if ferry is not None:
                ferry.wait()
            self._known += swap_in(bank, queries, _of_heads(scores, bank.heads), source, count)
        self.wanted += count * len(bank.heads) * queries.shape[0]


def _of_heads(scores: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Of `(batch, kv heads, n)` those of some heads; indexing by a list would wait for the
    device."""
    if heads == tuple(range(scores.shape[1])):
        return scores
    return torch.stack([scores[:, head] for head in heads], 1)


def _plain(bank: Bank, source: Bank) -> bool:
    """Whether all is exact, in places that are positions."""
    return (
        bank.front is None
        and source.front is None
        and int(source.own_positions[0, 0, source.used - 1]) == source.used - 1
    )


def _compiles(bank: Bank, batch: int) -> bool:
    """Whether the compiled loop knows a bank that is plain: one sequence on a CPU, of float32."""
    return (
        has_compiled(bank.own_keys.device)
        and batch == 1
        and bank.own_keys.dtype == torch.float32
        and bank.rows is None
    )


def _swap_in_compiled(bank: Bank, queries: Tensor, scores: Tensor, source: Bank, count: int) -> int:
    """`swap_in` for one sequence, compiled."""
    from kvlite.ops import numba_recall as compiled

    everything = source.own_keys[0].numpy(), source.own_values[0].numpy()
    held = bank.own_keys[0], bank.own_values[0], bank.own_positions[0]
    came: int = compiled.fill(
        queries.contiguous().numpy(),
        scores.numpy(),
        np.array(bank.heads),
        everything,
        tuple(each.numpy() for each in held),
        bank.used,
        count,
        CANDIDATES * count,
        SINKS,
        RECENT,
    )
    return came
