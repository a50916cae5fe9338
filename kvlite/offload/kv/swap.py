"""Swapping the entries that a token wants most for the least wanted ones of a head group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, Selection
from kvlite.cache.head_group import wide
from kvlite.cache.quantization.hadamard import rotation
from kvlite.offload.kv.store import INDEXED_AT_ONCE
from kvlite.offload.kv.transfer import KVTransfer
from kvlite.ops.heads import of_heads

CANDIDATES = 4
SINKS, RECENT = 4, INDEXED_AT_ONCE


@dataclass(frozen=True)
class RecallQuery:
    """What one token looks for, for a head group.

    Attributes:
        queries: `(batch, heads of the group, rows, dim)`.
        scale: what they are multiplied by.
        scores: the estimated attention to each entry of the source, `(batch, kv heads, n)` float32.
        source: everything, n entries of all KV heads in reading order.
        count: how many are wanted at most, including the first few and the recent ones.
    """

    queries: Tensor
    scale: float
    scores: Tensor
    source: KVHeadGroup
    count: int

    def of_heads(self, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The queries, scaled, and the scores of some KV heads, as numbers, both float32."""
        return self.queries.float() * self.scale, of_heads(self.scores, heads).nan_to_num()


def swap_in(head_group: KVHeadGroup, query: RecallQuery) -> int:
    """Fetch the entries that one token wants most into a head group, for any head group and any
    source. It waits for the device, because it has to know how many come.

    Args:
        head_group: already holds that token, and nothing that the source does not.

    Returns:
        How many came, over all heads and sequences.
    """
    (queries, scores), source = query.of_heads(head_group.heads), query.source
    slots = places_in(source, head_group.positions[:, :, : head_group.used])
    candidates = _candidates(scores, query.count)
    named = Selection(source, candidates.to(source.residual_keys.device), head_group.heads)
    keys = named.keys(slice(0, candidates.shape[2])).to(scores.device)
    best = _best(queries, keys, candidates, scores.shape[2], query.count)
    wanted = candidates.gather(2, best)
    held = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, slots, True)
    missing = ~held.gather(2, wanted)
    most = int(missing.sum(-1).max())
    if not most:
        return 0
    stays = torch.zeros_like(held).scatter_(2, wanted, True).gather(2, slots)
    worth = scores.gather(2, slots).masked_fill_(stays, torch.inf)
    comes, which = (each[:, :, :most] for each in in_front(missing))
    leaving = worth.topk(most, largest=False).indices
    return copy_in(head_group, source, wanted.gather(2, which), leaving, comes)


def copy_in(
    head_group: KVHeadGroup, source: KVHeadGroup, places: Tensor, slots: Tensor, comes: Tensor
) -> int:
    """Copy entries at `places` of a source of all KV heads into `slots` of a head group, `(batch,
    heads of the group, n)`, where `comes`; how many those are."""
    every, own = slice(0, places.shape[2]), comes.nonzero(as_tuple=True)
    new = Selection(source, places.to(source.residual_keys.device), head_group.heads)
    keys, values, positions = (
        each(every).to(slots.device)[own] for each in (new.keys, new.values, new.positions)
    )
    head_group.replace((own[0], own[1], slots[own]), keys, values, positions)
    return len(own[0])


def swap_in_place(
    head_group: KVHeadGroup, query: RecallQuery, transfer: KVTransfer, num_fetched: Tensor
) -> None:
    """Like `swap_in`, for an exact source whose places are positions, if the head group is exact or
    the device reads the source itself. The work does not depend on how many entries come, so the
    host waits at most once, and not at all for such a device.

    Everything is allocated before anything is written, and positions are written last, so that it
    can be retried after an error.

    Args:
        num_fetched: int64 counter on the device, to which the number of fetched entries is added.
    """
    source, count = query.source, query.count
    if transfer.reads(source):
        swap_on_device(head_group, head_group.residual_len, query, source.used, num_fetched)
        return
    queries, scores = query.of_heads(head_group.heads)
    places = head_group.residual_positions[:, :, : head_group.used].long()
    slots, candidates = places.shape[2], _candidates(scores, count)
    slot_of = torch.full_like(scores, -1, dtype=torch.int32)
    numbers = torch.arange(slots, dtype=torch.int32, device=scores.device)
    slot_of.scatter_(2, places, numbers.expand(places.shape))
    keys, values = transfer.fetch(source, head_group.heads, candidates)
    best = _best(queries, keys, candidates, scores.shape[2], count)
    held = slot_of.gather(2, candidates.gather(2, best)).long()
    missing = held < 0
    # Entries that are not held are marked in an additional last place.
    stays = torch.zeros(*places.shape[:2], slots + 1, dtype=torch.bool, device=scores.device)
    stays.scatter_(2, held.masked_fill(missing, slots), True)
    worth = scores.gather(2, places).masked_fill_(stays[:, :, :slots], torch.inf)
    leaving = worth.topk(count, largest=False).indices
    comes, order = in_front(missing)
    which = best.gather(2, order)
    along, chosen, from_ = wide(leaving, keys), comes[..., None], wide(which, keys)
    # Where none comes, what is there stays.
    new_keys = torch.where(chosen, keys.gather(2, from_), head_group.residual_keys.gather(2, along))
    new_values = torch.where(
        chosen, values.gather(2, from_), head_group.residual_values.gather(2, along)
    )
    new_positions = torch.where(
        comes,
        candidates.gather(2, which).int(),
        head_group.residual_positions.gather(2, leaving),
    )
    many = comes.sum()
    if head_group.rows is not None:
        rows = leaving[:, :, None].expand(-1, -1, head_group.rows.shape[2], -1)
        head_group.rows.scatter_(
            3, rows, head_group.rows.gather(3, rows).masked_fill_(comes[:, :, None], 0.0)
        )
    num_fetched += many
    head_group.residual_keys.scatter_(2, along, new_keys)
    head_group.residual_values.scatter_(2, along, new_values)
    head_group.residual_positions.scatter_(2, leaving, new_positions)


def swap_on_device(
    head_group: KVHeadGroup,
    own_slots: int,
    query: RecallQuery,
    seen: int | Tensor,
    num_fetched: Tensor,
    *,
    count: Tensor | None = None,
    writes: bool = True,
) -> None:
    """`swap_in_place` with kernels, on a device that reads the source itself.

    Args:
        own_slots: how many of the head group's own are looked at; positions in those that are free
            are none that the source has.
        seen: entries of the source, a number, or `(1,)` int64 on the device.
        count: how many entries there are of the storage that its segment is the beginning of,
            `(1,)` int64, where only the device knows; positions of the others likewise.
        writes: whether anything is changed.
    """
    # torch brings triton along on CUDA alone.
    from kvlite.ops.triton_candidates import Wanted
    from kvlite.ops.triton_recall import bring_back

    scores, source, most = query.scores, query.source, query.count
    wanted = Wanted(most, min(scores.shape[2], CANDIDATES * most), SINKS, RECENT)
    segment = head_group.packed if count is None else head_group.storage
    packed = None if segment is None else (segment, rotation(query.queries.shape[3], scores.device))
    held = head_group.segment_len if count is None else count
    host = source.residual_keys, source.residual_values
    given = host, query.queries, query.scale, scores, seen
    bring_back(head_group, packed, own_slots, held, *given, wanted, num_fetched, writes=writes)


def in_front(missing: Tensor) -> tuple[Tensor, Tensor]:
    """Of `(batch, heads, n)` bool, what is True in front; and which they were."""
    ordered = missing.byte().sort(dim=-1, descending=True, stable=True)
    return ordered.values.bool(), ordered.indices


def places_in(source: KVHeadGroup, positions: Tensor) -> Tensor:
    """Where entries of these positions `(batch, heads, n)` lie in the source: layers that were
    given only some of the tokens have gaps between positions."""
    order = source.positions[0, 0, : source.used].to(positions.device)
    return torch.searchsorted(order, positions.contiguous())


def _candidates(scores: Tensor, count: int) -> Tensor:
    # The first few and the recent ones are always among them.
    entries, forced = scores.shape[2], scores.clone()
    forced[:, :, :SINKS] = torch.inf
    forced[:, :, entries - RECENT :] = torch.inf
    return forced.topk(min(entries, CANDIDATES * count), sorted=False).indices


def _best(queries: Tensor, keys: Tensor, candidates: Tensor, entries: int, count: int) -> Tensor:
    # The first few and the recent ones are always among them.
    weights = (queries @ keys.float().mT).softmax(-1).mean(2).nan_to_num()
    forced = (candidates < SINKS) | (candidates >= entries - RECENT)
    return weights.masked_fill_(forced, torch.inf).topk(count, sorted=False).indices
