"""What one token wants most takes the place of what is least wanted in a bank."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvlite.cache import Bank, Selection
from kvlite.cache.selection import wide
from kvlite.offload.kv.store import INDEXED_AT_ONCE
from kvlite.offload.kv.transfer import Fetched

CANDIDATES = 4
SINKS, RECENT = 4, INDEXED_AT_ONCE

Fetch = Callable[[Bank, Bank, Tensor, Tensor], Fetched]


def swap_in(bank: Bank, queries: Tensor, scores: Tensor, source: Bank, count: int) -> int:
    """Let a bank hold what one token wants most, of everything that was read; for any bank and any
    source. How much comes is looked at in the midst of it, so a device is waited for.

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
    candidates = _candidates(scores, count)
    named = Selection(source, candidates.to(source.own_keys.device), bank.heads)
    keys = named.keys(slice(0, candidates.shape[2])).to(device)
    wanted = candidates.gather(2, _best(queries, keys, candidates, scores.shape[2], count))
    held = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, slots, True)
    missing = ~held.gather(2, wanted)
    most = int(missing.sum(-1).max())
    if not most:
        return 0
    stays = torch.zeros_like(held).scatter_(2, wanted, True).gather(2, slots)
    worth = scores.gather(2, slots).masked_fill_(stays, torch.inf)
    leaving = worth.topk(most, largest=False).indices
    comes, which = (each[:, :, :most] for each in _first(missing))
    coming = wanted.gather(2, which)
    new = Selection(source, coming.to(source.own_keys.device), bank.heads)
    own = comes.nonzero(as_tuple=True)
    keys, values, positions = (
        each(slice(0, most)).to(device)[own] for each in (new.keys, new.values, new.positions)
    )
    bank.replace((own[0], own[1], leaving[own]), keys, values, positions)
    return len(own[0])


def swap_in_place(
    bank: Bank, queries: Tensor, scores: Tensor, source: Bank, count: int, fetch: Fetch
) -> Tensor:
    """As `swap_in`, for a bank and a source that are all exact, in which places are positions: work
    of the same size whatever comes, so that nothing on the device is looked at. Who waits is
    `fetch`, at most once.

    The bank is asked first: what neighbouring steps want is nearly the same, and mostly there.
    Nothing is written before all is allocated, and positions are written last, so that it may be
    tried again after an error.

    Args:
        fetch: takes the bank, the source, places there `(batch, heads of the bank, n)`, and the
            slots in which the bank holds them, -1 for none.

    Returns:
        How many came, of all heads and sequences, int64 on the device.
    """
    scores, used = scores.nan_to_num(), bank.used
    places = bank.own_positions[:, :, :used].long()
    candidates = _candidates(scores, count)
    slot_of = torch.full_like(scores, -1, dtype=torch.int32)
    every = torch.arange(used, dtype=torch.int32, device=scores.device)
    slot_of.scatter_(2, places, every.expand(places.shape))
    slots = slot_of.gather(2, candidates).long()
    fetched = fetch(bank, source, candidates, slots)
    best = _best(queries, fetched.keys, candidates, scores.shape[2], count)
    held = slots.gather(2, best)
    missing = held < 0
    # What is not held is marked in a place of its own, behind the others.
    stays = torch.zeros(*places.shape[:2], used + 1, dtype=torch.bool, device=scores.device)
    stays.scatter_(2, torch.where(missing, used, held), True)
    worth = scores.gather(2, places).masked_fill_(stays[:, :, :used], torch.inf)
    leaving = worth.topk(count, largest=False).indices
    comes, order = _first(missing)
    which = best.gather(2, order)
    came = comes.sum()
    new = candidates.gather(2, which)
    keys = fetched.keys.gather(2, wide(which, fetched.keys))
    _exchange(bank, leaving, comes, keys, fetched.values(which, comes), new)
    return came


def _exchange(
    bank: Bank, slots: Tensor, comes: Tensor, keys: Tensor, values: Tensor, positions: Tensor
) -> None:
    """Put entries `(batch, heads, n, dim)` in the slots of an exact bank, `(batch, heads, n)` and
    no slot twice, where they come; elsewhere what is there is written again."""
    along, chosen = wide(slots, keys), comes[..., None]
    new_keys = torch.where(chosen, keys, bank.own_keys.gather(2, along))
    new_values = torch.where(chosen, values, bank.own_values.gather(2, along))
    new_positions = torch.where(comes, positions.int(), bank.own_positions.gather(2, slots))
    if bank.rows is not None:
        rows = slots[:, :, None].expand(-1, -1, bank.rows.shape[2], -1)
        bank.rows.scatter_(3, rows, bank.rows.gather(3, rows).masked_fill_(comes[:, :, None], 0.0))
    bank.own_keys.scatter_(2, along, new_keys)
    bank.own_values.scatter_(2, along, new_values)
    bank.own_positions.scatter_(2, slots, new_positions)


def _first(missing: Tensor) -> tuple[Tensor, Tensor]:
    """Of `(batch, heads, n)` bool, what is True in front; and which they were."""
    ordered = missing.byte().sort(dim=-1, descending=True, stable=True)
    return ordered.values.bool(), ordered.indices


def _slots(bank: Bank, source: Bank) -> Tensor:
    """Where entries of a bank lie in the source, `(batch, heads, used)`: layers that were given
    only some of the tokens have gaps between positions."""
    order = source.positions[0, 0, : source.used].to(bank.own_positions.device)
    return torch.searchsorted(order, bank.positions[:, :, : bank.used].contiguous())


def _candidates(scores: Tensor, count: int) -> Tensor:
    """The entries that may be wanted, several times `count`, `(batch, heads, n)`; the first few and
    the recent ones always among them."""
    entries, forced = scores.shape[2], scores.clone()
    forced[:, :, :SINKS] = torch.inf
    forced[:, :, entries - RECENT :] = torch.inf
    return forced.topk(min(entries, CANDIDATES * count), sorted=False).indices


def _best(queries: Tensor, keys: Tensor, candidates: Tensor, entries: int, count: int) -> Tensor:
    """Which `count` of the candidates, of so many entries, get most attention, `(batch, heads,
    count)`; the first few and the recent ones always among them."""
    weights = (queries @ keys.float().mT).softmax(-1).mean(2).nan_to_num()
    forced = (candidates < SINKS) | (candidates >= entries - RECENT)
    return weights.masked_fill_(forced, torch.inf).topk(count, sorted=False).indices
