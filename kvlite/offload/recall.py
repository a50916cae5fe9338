"""At every step of an answer: entries that its token wants come back into the cache.

Two stages. An index on the device says roughly what attention every entry would get, and names
several times as many candidates as are wanted; their keys, fetched from the tier, say it exactly.
What is wanted and not in the cache takes the place of what is least wanted there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlite.cache import Bank, Selection
from kvlite.cache.packed import Packed
from kvlite.cache.quantized import has_compiled
from kvlite.offload.tier import INDEXED_AT_ONCE, Tier

CANDIDATES = 4
SINKS, RECENT = 4, INDEXED_AT_ONCE


@dataclass
class Recall:
    """What an answer recalls from, and what it did.

    Attributes:
        entries: how many a KV head that each token may bring back, those that are there already
            included, beside the first few and the recent ones; 0 for none.
        wanted: entries that tokens wanted so far, over all layers and KV heads.
        brought: how many of these had to be brought back.
    """

    tier: Tier
    entries: int
    wanted: int = 0
    brought: int = 0

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
        heads."""
        source, count = self.tier.layers[layer].bank, self._count(bank)
        if _plain(bank, source):
            came = _swap_in_compiled(bank, queries[0], scores[0], source, count)
        else:
            came = swap_in(bank, queries, scores[:, list(bank.heads)], source, count)
        self.wanted += count * len(bank.heads) * queries.shape[0]
        self.brought += came


def _plain(bank: Bank, source: Bank) -> bool:
    """Whether the compiled loop knows these: one sequence on a CPU, all exact and of float32, in
    places that are positions."""
    return (
        has_compiled(bank.own_keys.device)
        and bank.own_keys.shape[0] == 1
        and bank.own_keys.dtype == torch.float32
        and bank.front is None
        and bank.rows is None
        and source.front is None
        and int(source.own_positions[0, 0, source.used - 1]) == source.used - 1
    )


def _swap_in_compiled(bank: Bank, queries: Tensor, scores: Tensor, source: Bank, count: int) -> int:
    """`swap_in` for one sequence, compiled."""
    from kvlite.offload import compiled

    everything = source.own_keys[0].numpy(), source.own_values[0].numpy()
    held = bank.own_keys[0], bank.own_values[0], bank.own_positions[0]
    came: int = compiled.fill(
        queries.contiguous().numpy(),
        scores.numpy(),
        np.array(bank.heads),
        everything,
        tuple(each[:, : bank.used].numpy() for each in held),
        count,
        CANDIDATES * count,
        SINKS,
        RECENT,
    )
    return came


def swap_in(bank: Bank, queries: Tensor, scores: Tensor, source: Bank, count: int) -> int:
    """Let a bank hold what one token wants most, of everything that was read.

    Args:
        bank: holds that token already, and nothing that `source` does not.
        queries: `(batch, heads of the bank, rows, dim)` float32, scaled.
        scores: roughly the attention they pay to each entry of the source, `(batch, heads of the
            bank, n)` float32.
        source: everything, n entries of all KV heads in the order they were read.
        count: how many it wants at most, the first few and the recent ones included.

    Returns:
        How many came, of all heads and sequences.
    """
    device, scores = scores.device, scores.nan_to_num()
    slots = _slots(bank, source)
    wanted = _wanted(queries, scores, source, bank.heads, count)
    held = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, slots, True)
    missing = ~held.gather(2, wanted)
    most = int(missing.sum(-1).max())
    if not most:
        return 0
    stays = torch.zeros_like(held).scatter_(2, wanted, True).gather(2, slots)
    worth = scores.gather(2, slots).masked_fill_(stays, torch.inf)
    leaving = worth.topk(most, largest=False).indices
    comes, which = missing.byte().topk(most)
    coming = wanted.gather(2, which)
    new = Selection(source, coming.to(source.own_keys.device), bank.heads)
    own = comes.nonzero(as_tuple=True)
    keys, values, positions = (
        each(slice(0, most)).to(device)[own] for each in (new.keys, new.values, new.positions)
    )
    bank.replace((own[0], own[1], leaving[own]), keys, values, positions)
    return len(own[0])


def _slots(bank: Bank, source: Bank) -> Tensor:
    """Where entries of a bank lie in the source, `(batch, heads, used)`: layers that were given
    only some of the tokens have gaps between positions."""
    order = source.positions[0, 0, : source.used].to(bank.own_positions.device)
    return torch.searchsorted(order, bank.positions[:, :, : bank.used].contiguous())


def _wanted(
    queries: Tensor, scores: Tensor, source: Bank, heads: tuple[int, ...], count: int
) -> Tensor:
    """The `count` entries that get most attention, `(batch, heads, count)`; the first few and the
    recent ones always among them."""
    entries = scores.shape[2]
    forced = torch.zeros(entries, dtype=torch.bool, device=scores.device)
    forced[:SINKS] = True
    forced[entries - RECENT :] = True
    candidates = (
        scores.masked_fill(forced, torch.inf)
        .topk(min(entries, CANDIDATES * count), sorted=False)
        .indices
    )
    named = Selection(source, candidates.to(source.own_keys.device), heads)
    keys = named.keys(slice(0, candidates.shape[2])).to(scores.device)
    weights = (queries @ keys.float().mT).softmax(-1).mean(2).nan_to_num()
    best = weights.masked_fill_(forced[candidates], torch.inf).topk(count, sorted=False).indices
    return candidates.gather(2, best)
