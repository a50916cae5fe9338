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
from kvlite.ops.triton_pack import Segment, pack
from kvlite.ops.triton_replace import is_packed, own_slot, replace

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


@dataclass(frozen=True)
class HeadGroupTensors:
    """What a head group holds, on the device.

    Attributes:
        heads: its KV heads, ascending.
        keys, values: `(batch, heads, slots, dim)`, each of a head's entries right behind the one
            before.
        positions: `(batch, heads, slots)` int32. A slot whose position is not below what was read
            is free, and stays it.
        rows: what is remembered of all entries, `(batch, heads, R, slots)` float32, 0 for one that
            came; or None.
        segment: quantized entries among these; or None.
    """

    heads: tuple[int, ...]
    keys: Tensor
    values: Tensor
    positions: Tensor
    rows: Tensor | None
    segment: Segment | None


def bring_back(
    held: HeadGroupTensors,
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
    keys, values = source
    (batch, _, asked, dim), entries, segment = queries.shape, scores.shape[2], held.segment
    start, packed = (0, 0) if segment is None else (segment.start, segment.positions.shape[2])
    slots, named = packed + held.positions.shape[2], wanted.candidates
    ends = {"FIRST": wanted.first, "RECENT": wanted.recent, "ON_DEVICE": isinstance(seen, Tensor)}
    row = {"ROWS": asked, "DIM": dim, "WIDE": triton.next_power_of_2(dim)}

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=queries.device)

    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(queries):
        for at, first, length in runs(held.heads):
            own, far, lines = slice(at, at + length), slice(first, first + length), batch * length
            candidates, in_slots, worth = (numbers(lines, n) for n in (named, named, slots))
            positions = (
                held.positions[:, own],
                None if segment is None else segment.positions[:, own],
            )
            _name[length, batch](
                scores[:, far],
                *positions,
                seen,
                numbers(lines, entries),
                *(numbers(lines, -(-entries // NEIGHBORS)) for _ in range(2)),
                *(numbers(lines, entries) for _ in range(2)),
                numbers(lines, named),
                candidates,
                in_slots,
                worth,
                *scores.stride()[:2],
                *held.positions.stride()[:2],
                *((0, 0) if segment is None else segment.positions.stride()[:2]),
                entries,
                slots,
                named,
                start,
                packed,
                **ends,
                NEIGHBORS=NEIGHBORS,
                SCANNED=SCANNED,
                BLOCK=CHOSEN_FROM,
                num_warps=8,
            )
            logits = torch.empty(lines, asked, named, device=queries.device)
            _compare[-(-named // TILE), length, batch](
                queries[:, own],
                keys[:, far],
                held.keys[:, own],
                candidates,
                in_slots,
                logits,
                scale,
                *queries.stride()[:3],
                *keys.stride()[:2],
                *held.keys.stride()[:2],
                named,
                start,
                packed,
                **row,
                TILE=TILE,
                num_warps=4,
            )
            coming, leaving = numbers(lines, wanted.count), numbers(lines, wanted.count)
            missing = numbers(lines)
            replace[length, batch](
                logits,
                candidates,
                in_slots,
                worth,
                seen,
                numbers(lines, named),
                numbers(lines, wanted.count),
                coming,
                leaving,
                missing,
                keys[:, far],
                values[:, far],
                held.keys[:, own],
                held.values[:, own],
                positions[0],
                None if held.rows is None else held.rows[:, own],
                came,
                *keys.stride()[:2],
                *held.keys.stride()[:2],
                *held.positions.stride()[:2],
                *((0, 0, 0) if held.rows is None else held.rows.stride()[:3]),
                slots,
                named,
                wanted.count if writes else 0,
                wanted.count,
                start,
                packed,
                **ends,
                **row,
                REMEMBERED=0 if held.rows is None else held.rows.shape[2],
                ALL=triton.next_power_of_2(named),
                BLOCK=CHOSEN_FROM,
                TILE=TILE,
                num_warps=4,
            )
            if segment is not None:
                pack(segment, own, (keys[:, far], values[:, far]), coming, leaving, missing)


@triton.jit(do_not_specialize=["seen", "entries", "slots", "wanted", "start", "packed"])
def _name(
    scores,
    positions,
    packed_positions,
    seen,
    slot_of,
    maxima,
    near,
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
    c_batch,
    c_head,
    entries,
    slots,
    wanted,
    start,
    packed,
    ON_DEVICE: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    NEIGHBORS: tl.constexpr,
    SCANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The candidates of one KV head, ascending, the slots they are held in, or -1, and what is held
    there: the larger `worth`, the sooner it gives way, and never at 0."""
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = batch * tl.num_programs(0) + head
    scores += batch * s_batch + head * s_head
    positions += batch * p_batch + head * p_head
    if packed_positions is not None:
        packed_positions += batch * c_batch + head * c_head
    slot_of += line * entries
    groups = tl.cdiv(entries, NEIGHBORS)
    maxima += line * groups
    near += line * groups
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
        place = _place(positions, packed_positions, each, real, start, packed)
        tl.store(slot_of + place, each, mask=real)
        score = ascending(tl.load(scores + place, mask=real, other=0.0))
        tl.store(worth + each, tl.where(place < filled, highest - score, 0), mask=real)
    for at in range(0, filled, SCANNED):
        each = at + tl.arange(0, SCANNED)
        score = ascending(tl.load(scores + each, mask=each < filled, other=0.0))
        most = tl.max(tl.reshape(score, (SCANNED // NEIGHBORS, NEIGHBORS)), 1)
        group = at // NEIGHBORS + tl.arange(0, SCANNED // NEIGHBORS)
        tl.store(maxima + group, most, mask=group < groups)
    # What others of these threads wrote is read from here on.
    tl.debug_barrier()
    filled_groups = tl.cdiv(filled, NEIGHBORS)
    least = ranked(maxima, filled_groups, wanted, BLOCK)
    near_count = 0
    for at in range(0, filled_groups, BLOCK):
        each = at + tl.arange(0, BLOCK)
        reaches = tl.load(maxima + each, mask=each < filled_groups, other=-1) >= least
        rank = near_count + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(near + rank, each, mask=reaches)
        near_count += tl.sum(reaches.to(tl.int32), 0)
    tl.debug_barrier()
    reach = 0
    for at in range(0, near_count * NEIGHBORS, BLOCK):
        each = at + tl.arange(0, BLOCK)
        real = each < near_count * NEIGHBORS
        group = tl.load(near + each // NEIGHBORS, mask=real, other=0)
        place = group * NEIGHBORS + each % NEIGHBORS
        real = real & (place >= FIRST) & (place < filled - RECENT)
        score = ascending(tl.load(scores + place, mask=real, other=0.0))
        reaches = real & (score >= least)
        rank = reach + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(reaching + rank, score, mask=reaches)
        tl.store(places + rank, place, mask=reaches)
        reach += tl.sum(reaches.to(tl.int32), 0)
    tl.debug_barrier()
    largest(reaching, reach, wanted - FIRST - RECENT, best, BLOCK)
    for at in range(0, wanted, BLOCK):
        each = at + tl.arange(0, BLOCK)
        real = each < wanted
        between = (each >= FIRST) & (each < wanted - RECENT)
        chosen = tl.load(best + each - FIRST, mask=between, other=0)
        chosen = tl.load(places + chosen, mask=between, other=0)
        end = tl.where(each < FIRST, each, filled - wanted + each)
        place = tl.where(between, chosen, end)
        # A place that is not held has whatever was there.
        slot = tl.load(slot_of + place, mask=real, other=-1)
        there = real & (slot >= 0) & (slot < slots)
        own = _place(positions, packed_positions, slot, there, start, packed)
        there = there & (own == place)
        tl.store(candidates + each, place, mask=real)
        tl.store(in_slots + each, tl.where(there, slot, -1), mask=real)


@triton.jit
def _place(positions, packed_positions, slot, real, start, packed):
    """The positions of what is in slots that are `real`."""
    inside = is_packed(slot, start, packed)
    place = tl.load(positions + own_slot(slot, start, packed), mask=real & ~inside, other=-1)
    if packed_positions is not None:
        other = tl.load(packed_positions + slot - start, mask=real & inside, other=-1)
        place = tl.where(inside, other, place)
    return place


@triton.jit(do_not_specialize=["wanted", "start", "packed"])
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
    start,
    packed,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The logits of some candidates of one KV head; a key that is held exactly is read there."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = batch * tl.num_programs(1) + head
    queries += batch * q_batch + head * q_head
    keys += batch * k_batch + head * k_head
    own_keys += batch * o_batch + head * o_head
    each = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = each < wanted
    place = tl.load(candidates + line * wanted + each, mask=real, other=0).to(tl.int64)
    slot = tl.load(in_slots + line * wanted + each, mask=real, other=0)
    channels = tl.arange(0, WIDE)
    inside = channels < DIM
    near = (slot >= 0) & ~is_packed(slot, start, packed)
    slot = own_slot(slot, start, packed).to(tl.int64)
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
