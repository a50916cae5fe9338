"""Swapping the entries that a token wants most for the least wanted ones of a head group."""

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, Selection
from kvlite.cache.packed import Packed
from kvlite.cache.quantized import rotation
from kvlite.cache.selection import wide
from kvlite.offload.kv.store import INDEXED_AT_ONCE
from kvlite.offload.kv.transfer import KVTransfer
from kvlite.ops.heads import of_heads

CANDIDATES = 4
SINKS, RECENT = 4, INDEXED_AT_ONCE


def swap_in(
    head_group: KVHeadGroup, queries: Tensor, scores: Tensor, source: KVHeadGroup, count: int
) -> int:
    """Fetch the entries that one token wants most into a head group, for any head group and any
    source. It waits for the device, because it has to know how many come.

    Args:
        head_group: already holds that token, and nothing that `source` does not.
        queries: `(batch, heads of the group, rows, dim)` float32, scaled.
        scores: the estimated attention to each entry of the source, `(batch, heads of the group,
            n)` float32.
        source: everything, n entries of all KV heads in reading order.
        count: how many are wanted at most, including the first few and the recent ones.

    Returns:
        How many came, over all heads and sequences.
    """
    device, scores = scores.device, scores.nan_to_num()
    slots = places_in(source, head_group.positions[:, :, : head_group.used])
    candidates = _candidates(scores, count)
    named = Selection(source, candidates.to(source.residual_keys.device), head_group.heads)
    keys = named.keys(slice(0, candidates.shape[2])).to(device)
    best = _best(queries, keys, candidates, scores.shape[2], count)
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
    head_group: KVHeadGroup,
    queries: Tensor,
    scale: float,
    scores: Tensor,
    source: KVHeadGroup,
    count: int,
    transfer: KVTransfer,
    came: Tensor,
) -> None:
    """Like `swap_in`, for an exact source whose places are positions, if the head group is exact or
    the device reads the source itself. The work does not depend on how many entries come, so the
    host waits at most once, and not at all for such a device.

    Everything is allocated before anything is written, and positions are written last, so that it
    can be retried after an error.

    Args:
        queries: as for `swap_in`, but they are multiplied by `scale` here.
        scores: as for `swap_in`, but of all KV heads.
        came: int64 counter on the device, to which the number of fetched entries is added.
    """
    if transfer.reads(source):
        given = queries, scale, scores, source, source.used, count, came
        swap_on_device(head_group, head_group.used, *given)
        return
    queries, scores = queries.float() * scale, of_heads(scores, head_group.heads).nan_to_num()
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
    came += many
    head_group.residual_keys.scatter_(2, along, new_keys)
    head_group.residual_values.scatter_(2, along, new_values)
    head_group.residual_positions.scatter_(2, leaving, new_positions)


def swap_on_device(
    head_group: KVHeadGroup,
    slots: int,
    queries: Tensor,
    scale: float,
    scores: Tensor,
    source: KVHeadGroup,
    seen: int | Tensor,
    count: int,
    came: Tensor,
    *,
    writes: bool = True,
) -> None:
    """`swap_in_place` with kernels, on a device that reads the source itself.

    Args:
        slots: how many of the head group's are looked at; positions in those that are free are none
            that the source has.
        seen: entries of the source, a number, or `(1,)` int64 on the device.
        writes: whether anything is changed.
    """
    # torch brings triton along on CUDA alone.
    from kvlite.ops.triton_candidates import Wanted
    from kvlite.ops.triton_recall import bring_back

    wanted = Wanted(count, min(scores.shape[2], CANDIDATES * count), SINKS, RECENT)
    segment, packed = head_group.segment, None
    if segment is not None:
        assert isinstance(segment, Packed) and not segment.bits.by_channel
        packed = segment, rotation(queries.shape[3], queries.device)
    given = (source.residual_keys, source.residual_values), queries, scale, scores, seen
    bring_back(head_group, packed, slots, *given, wanted, came, writes=writes)


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
