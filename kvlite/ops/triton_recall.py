"""Recall's second stage on a CUDA device that reads pinned memory by itself: three launches bring
the entries that a token wants most into a head group.

The first names candidates by their estimated attention, the second compares their real keys, the
third puts the best that are not held in the place of others. Nothing is read back, and what runs
depends on shapes alone, so that nobody waits and a CUDA graph can hold it.

The largest of all entries are found among a few. The maxima of as many groups of neighbors as
entries are wanted are themselves entries, so no entry below the least of these maxima is wanted.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.heads import runs
from kvlite.ops.triton_largest import ascending, largest, ranked
from kvlite.ops.triton_replace import replace

NEIGHBORS = 32
SCANNED = 4096
CHOSEN_FROM = 1024
TILE = 16


@dataclass(frozen=True)
class Wanted:
    """How many entries a token wants of a KV head.

    Attributes:
        count: at most as many as are held, more than `first + recent`.
        candidates: how many are compared by their keys, at least `count`.
        first, recent: entries at both ends that are always wanted.
    """

    count: int
    candidates: int
    first: int
    recent: int


def bring_back(
    heads: tuple[int, ...],
    held: tuple[Tensor, Tensor, Tensor],
    rows: Tensor | None,
    source: tuple[Tensor, Tensor],
    queries: Tensor,
    scale: float,
    scores: Tensor,
    seen: int | Tensor,
    wanted: Wanted,
    came: Tensor,
    *,
    writes: bool = True,
) -> None:
    """Let a head group hold the entries that one token wants most, in place of those with the
    least scores.

    Args:
        heads: the head group's KV heads, ascending.
        held: its keys and values `(batch, heads, slots, dim)` and positions `(batch, heads, slots)`
            int32, each of a head's entries right behind the one before. A slot whose position is
            not below `seen` is free, and stays it.
        rows: what it remembers, `(batch, heads, R, slots)` float32, 0 for an entry that came; or
            None.
        source: keys and values `(batch, kv heads, places, dim)`, pinned; an entry's place is its
            position.
        queries: of the head group's heads, `(batch, heads, rows, dim)`; a row's channels lie
            together.
        scale: what they are multiplied by.
        scores: the estimated attention, `(batch, kv heads, n)` float32, for every position held.
        seen: how many places are filled, a number, or `(1,)` int64 on the device; at least
            `wanted.candidates`.
        came: int64, to which is added how many came.
        writes: whether anything is put anywhere.
    """
    (keys, values), (own_keys, own_values, positions) = source, held
    (batch, _, asked, dim), entries, slots = queries.shape, scores.shape[2], positions.shape[2]

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=queries.device)

    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(queries):
        for at, start, length in runs(heads):
            own, far = slice(at, at + length), slice(start, start + length)
            lines = batch * length
            candidates, slot_of = numbers(lines, wanted.candidates), numbers(lines, entries)
            in_slots, worth = numbers(lines, wanted.candidates), numbers(lines, slots)
            _name[length, batch](
                scores[:, far],
                positions[:, own],
                seen,
                slot_of,
                numbers(lines, -(-entries // NEIGHBORS)),
                numbers(lines, entries),
                numbers(lines, entries),
                numbers(lines, wanted.candidates),
                candidates,
                in_slots,
                worth,
                *scores.stride()[:2],
                *positions.stride()[:2],
                entries,
                slots,
                wanted.candidates,
                ON_DEVICE=isinstance(seen, Tensor),
                FIRST=wanted.first,
                RECENT=wanted.recent,
                NEIGHBORS=NEIGHBORS,
                BLOCK=SCANNED,
                num_warps=8,
            )
            logits = torch.empty(lines, asked, wanted.candidates, device=queries.device)
            _compare[-(-wanted.candidates // TILE), length, batch](
                queries[:, own],
                keys[:, far],
                own_keys[:, own],
                candidates,
                in_slots,
                logits,
                scale,
                *queries.stride()[:3],
                *keys.stride()[:2],
                *own_keys.stride()[:2],
                wanted.candidates,
                ROWS=asked,
                DIM=dim,
                WIDE=triton.next_power_of_2(dim),
                TILE=TILE,
                num_warps=4,
            )
            replace[length, batch](
                logits,
                candidates,
                in_slots,
                worth,
                seen,
                numbers(lines, wanted.candidates),
                numbers(lines, wanted.count),
                numbers(lines, wanted.count),
                numbers(lines, wanted.count),
                keys[:, far],
                values[:, far],
                own_keys[:, own],
                own_values[:, own],
                positions[:, own],
                None if rows is None else rows[:, own],
                came,
                *keys.stride()[:2],
                *own_keys.stride()[:2],
                *positions.stride()[:2],
                *((0, 0, 0) if rows is None else rows.stride()[:3]),
                slots,
                wanted.candidates,
                wanted.count if writes else 0,
                wanted.count,
                ON_DEVICE=isinstance(seen, Tensor),
                FIRST=wanted.first,
                RECENT=wanted.recent,
                ROWS=asked,
                REMEMBERED=0 if rows is None else rows.shape[2],
                DIM=dim,
                WIDE=triton.next_power_of_2(dim),
                ALL=triton.next_power_of_2(wanted.candidates),
                BLOCK=CHOSEN_FROM,
                TILE=TILE,
                num_warps=4,
            )


@triton.jit(do_not_specialize=["seen", "entries", "slots", "wanted"])
def _name(
    scores,
    positions,
    seen,
    slot_of,
    maxima,
    reaching,
    places,
    best,
    candidates,
    in_slots,
    worth,
    s_batch,
    s_head,
    p_batch,
    p_head,
    entries,
    slots,
    wanted,
    ON_DEVICE: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    NEIGHBORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The candidates of one KV head, the slots they are held in, or -1, and what is held there: the
    larger `worth`, the sooner it gives way, and never at 0."""
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = batch * tl.num_programs(0) + head
    scores += batch * s_batch + head * s_head
    positions += batch * p_batch + head * p_head
    slot_of += line * entries
    groups = tl.cdiv(entries, NEIGHBORS)
    maxima += line * groups
    reaching += line * entries
    places += line * entries
    best += line * wanted
    candidates += line * wanted
    in_slots += line * wanted
    worth += line * slots
    filled = tl.load(seen).to(tl.int32) if ON_DEVICE else seen
    highest = tl.full((), 0x7F800000, tl.int32)

    for at in range(0, slots, BLOCK):
        each = at + tl.arange(0, BLOCK)
        real = each < slots
        place = tl.load(positions + each, mask=real, other=0)
        tl.store(slot_of + place, each, mask=real)
        score = ascending(tl.load(scores + place, mask=real, other=0.0))
        tl.store(worth + each, tl.where(place < filled, highest - score, 0), mask=real)
    for at in range(0, filled, BLOCK):
        each = at + tl.arange(0, BLOCK)
        score = ascending(tl.load(scores + each, mask=each < filled, other=0.0))
        most = tl.max(tl.reshape(score, (BLOCK // NEIGHBORS, NEIGHBORS)), 1)
        group = at // NEIGHBORS + tl.arange(0, BLOCK // NEIGHBORS)
        tl.store(maxima + group, most, mask=group < groups)
    # What others of these threads wrote is read from here on.
    tl.debug_barrier()
    least = ranked(maxima, tl.cdiv(filled, NEIGHBORS), wanted, BLOCK)
    reach = 0
    for at in range(0, filled, BLOCK):
        each = at + tl.arange(0, BLOCK)
        score = ascending(tl.load(scores + each, mask=each < filled, other=0.0))
        reaches = (score >= least) & (each >= FIRST) & (each < filled - RECENT)
        rank = reach + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(reaching + rank, score, mask=reaches)
        tl.store(places + rank, each, mask=reaches)
        reach += tl.sum(reaches.to(tl.int32), 0)
    tl.debug_barrier()
    largest(reaching, reach, wanted - FIRST - RECENT, best, BLOCK)
    for at in range(0, wanted, BLOCK):
        each = at + tl.arange(0, BLOCK)
        real = each < wanted
        between = each - FIRST - RECENT
        chosen = tl.load(best + between, mask=real & (between >= 0), other=0)
        chosen = tl.load(places + chosen, mask=real & (between >= 0), other=0)
        end = tl.where(each < FIRST, each, filled - FIRST - RECENT + each)
        place = tl.where(between >= 0, chosen, end)
        # A place that is not held has whatever was there.
        slot = tl.load(slot_of + place, mask=real, other=-1)
        there = real & (slot >= 0) & (slot < slots)
        there = there & (tl.load(positions + slot, mask=there, other=-1) == place)
        tl.store(candidates + each, place, mask=real)
        tl.store(in_slots + each, tl.where(there, slot, -1), mask=real)


@triton.jit(do_not_specialize=["wanted"])
def _compare(
    queries,
    keys,
    own_keys,
    candidates,
    in_slots,
    logits,
    scale,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    o_batch,
    o_head,
    wanted,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The logits of some candidates of one KV head; a key that is held is read there."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = batch * tl.num_programs(1) + head
    queries += batch * q_batch + head * q_head
    keys += batch * k_batch + head * k_head
    own_keys += batch * o_batch + head * o_head
    each = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = each < wanted
    place = tl.load(candidates + line * wanted + each, mask=real, other=0).to(tl.int64)
    slot = tl.load(in_slots + line * wanted + each, mask=real, other=0).to(tl.int64)
    channels = tl.arange(0, WIDE)
    inside = channels < DIM
    near = slot >= 0
    there = real[:, None] & inside[None, :]
    far = keys + place[:, None] * DIM + channels[None, :]
    far = tl.load(far, mask=there & ~near[:, None], other=0.0)
    key = own_keys + slot[:, None] * DIM + channels[None, :]
    key = tl.load(key, mask=there & near[:, None], other=0.0)
    key = tl.where(near[:, None], key, far).to(tl.float32)
    for row in range(ROWS):
        query = tl.load(queries + row * q_row + channels, mask=inside, other=0.0)
        logit = tl.sum(key * (query.to(tl.float32) * scale)[None, :], 1)
        tl.store(logits + (line * ROWS + row) * wanted + each, logit, mask=real)
