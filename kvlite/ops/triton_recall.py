"""Recall's second stage on a CUDA device that reads pinned memory by itself: five launches bring
the entries that a token wants most into a head group.

Two name candidates by their estimated attention, the third compares their real keys, the fourth
chooses what comes and what leaves, and the fifth moves it. Nothing is read back, and what runs
depends on shapes alone, so that nobody waits and a CUDA graph can hold it.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.heads import runs
from kvlite.ops.triton_candidates import Wanted, name_candidates
from kvlite.ops.triton_largest import ascending, largest
from kvlite.ops.triton_pack import pack

if TYPE_CHECKING:
    from kvlite.cache.head_group import KVHeadGroup
    from kvlite.cache.packed import Packed

# What a program takes at once: candidates compared, entries moved, slots that it chooses from.
COMPARED = 16
MOVED = 8
CHOSEN_FROM = 1 << 14


def bring_back(
    held: "KVHeadGroup",
    packed: "tuple[Packed, Tensor] | None",
    own_slots: int,
    count: int | Tensor,
    source: tuple[Tensor, Tensor],
    queries: Tensor,
    scale: float,
    scores: Tensor,
    seen: int | Tensor,
    wanted: Wanted,
    num_fetched: Tensor,
    *,
    writes: bool = True,
) -> None:
    """Let a head group hold the entries that one token wants most, in place of those with the
    least scores.

    Args:
        held: on the device. A slot whose position is not below `seen` is free, and stays it.
        packed: its segment, if it has one, or the storage that this is the beginning of, and what
            vectors are rotated by for it, `(dim, dim)` float32. Slots are numbered by where they
            lie: its own, and behind these the segment's.
        own_slots: how many of its own are looked at.
        count: entries of the segment, a number, or `(1,)` int64 on the device: of remembered
            attention they come between the first few and the rest.
        source: keys and values `(batch, kv heads, places, dim)`, pinned; an entry's place is its
            position.
        queries: of the head group's heads, `(batch, heads, rows, dim)`; a row's channels lie
            together.
        scale: what they are multiplied by.
        scores: the estimated attention, `(batch, kv heads, n)` float32, for every position held.
        seen: how many places are filled, a number, or `(1,)` int64 on the device; at least
            `wanted.candidates`.
        num_fetched: int64, to which is added how many came.
        writes: whether anything is put anywhere.
    """
    keys, values = source
    (batch, _, asked, dim), named = queries.shape, wanted.candidates
    wide, start, slots = triton.next_power_of_2(dim), 0, own_slots
    own_keys, own_values, own_positions = held.residuals
    if packed is not None:
        start, slots = packed[0].start, own_slots + packed[0].count

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=queries.device)

    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(queries):
        for at, first, length in runs(held.heads):
            own, far, lines = slice(at, at + length), slice(first, first + length), batch * length
            positions = own_positions[:, own, :own_slots]
            quantized = None if packed is None else packed[0].positions[:, own]
            candidates, in_slots, worth = name_candidates(
                scores[:, far], positions, quantized, seen, wanted
            )
            logits = torch.empty(lines, asked, named, device=queries.device)
            _compare[-(-named // COMPARED), length, batch](
                queries[:, own], keys[:, far], own_keys[:, own], candidates, in_slots, logits,
                scale,
                *queries.stride()[:3], *keys.stride()[:2], *own_keys.stride()[:2],
                named, own_slots,
                ROWS=asked, DIM=dim, WIDE=wide, TILE=COMPARED,
                num_warps=4,
            )  # fmt: skip
            coming, leaving = numbers(lines, wanted.count), numbers(lines, wanted.count)
            missing = numbers(lines)
            _choose[length, batch](
                logits, candidates, in_slots, worth, seen, numbers(lines, named),
                numbers(lines, wanted.count), coming, leaving, missing, num_fetched, slots, named,
                wanted.count if writes else 0, wanted.count,
                ON_DEVICE=isinstance(seen, Tensor), FIRST=wanted.first, RECENT=wanted.recent,
                ROWS=asked, ALL=triton.next_power_of_2(named),
                SLOTS=min(CHOSEN_FROM, triton.next_power_of_2(slots)),
                num_warps=8,
            )  # fmt: skip
            _move[-(-wanted.count // MOVED), length, batch](
                coming, leaving, missing, keys[:, far], values[:, far], own_keys[:, own],
                own_values[:, own], positions, None if held.rows is None else held.rows[:, own],
                *keys.stride()[:2], *own_keys.stride()[:2], *positions.stride()[:2],
                *((0, 0, 0) if held.rows is None else held.rows.stride()[:3]),
                wanted.count, own_slots, start, count,
                ON_DEVICE=isinstance(count, Tensor),
                REMEMBERED=0 if held.rows is None else held.rows.shape[2], DIM=dim, WIDE=wide,
                TILE=MOVED,
                num_warps=4,
            )  # fmt: skip
            if packed is not None:
                host = keys[:, far], values[:, far]
                pack(*packed, own_slots, own, host, coming, leaving, missing)


@triton.jit(do_not_specialize=["wanted", "own_slots"])
def _compare(
    queries, keys, own_keys, candidates, in_slots, logits, scale,
    q_batch, q_head, q_row, k_batch, k_head, o_batch, o_head,
    wanted, own_slots,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
    near = (slot >= 0) & (slot < own_slots)
    slot = slot.to(tl.int64)
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


@triton.jit(do_not_specialize=["seen", "slots", "wanted", "count", "room"])
def _choose(
    logits, candidates, in_slots, worth, seen, weights, best, coming, leaving, missing_of,
    num_fetched, slots, wanted, count, room,
    ON_DEVICE: tl.constexpr, FIRST: tl.constexpr, RECENT: tl.constexpr, ROWS: tl.constexpr,
    ALL: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The `count` best candidates of one KV head come, unless they are held, into the slots worth
    least; both are noted, with `room` for as many."""
    line = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    logits += line * ROWS * wanted
    candidates += line * wanted
    in_slots += line * wanted
    weights += line * wanted
    worth += line * slots
    best += line * room
    coming += line * room
    leaving += line * room
    filled = tl.load(seen).to(tl.int32) if ON_DEVICE else seen

    _weigh(logits, candidates, weights, wanted, filled, FIRST, RECENT, ROWS, ALL)
    largest(weights, wanted, count, best, ALL)
    each = tl.arange(0, ALL)
    real = each < count
    chosen = tl.load(best + each, mask=real, other=0)
    slot = tl.load(in_slots + chosen, mask=real, other=0)
    tl.store(worth + slot, 0, mask=real & (slot >= 0))
    comes = (real & (slot < 0)).to(tl.int32)
    place = tl.load(candidates + chosen, mask=comes > 0, other=0)
    tl.store(coming + tl.cumsum(comes, 0) - 1, place, mask=comes > 0)
    missing = tl.sum(comes, 0)
    tl.debug_barrier()
    largest(worth, slots, missing, leaving, SLOTS)
    tl.store(missing_of + line, missing)
    tl.atomic_add(num_fetched, missing)


@triton.jit(do_not_specialize=["room", "own_slots", "start", "count"])
def _move(
    coming, leaving, missing_of, keys, values, own_keys, own_values, positions, rows,
    k_batch, k_head, o_batch, o_head, p_batch, p_head, r_batch, r_head, r_row,
    room, own_slots, start, count,
    ON_DEVICE: tl.constexpr, REMEMBERED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Some of the entries that come into one KV head; what goes into a segment is not written."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = batch * tl.num_programs(1) + head
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    come = entries < tl.load(missing_of + line)
    place = tl.load(coming + line * room + entries, mask=come, other=0)
    to = tl.load(leaving + line * room + entries, mask=come, other=0)
    exact = come & (to < own_slots)
    channels = tl.arange(0, WIDE)
    there = exact[:, None] & (channels < DIM)[None, :]
    begin = batch * k_batch + head * k_head + place.to(tl.int64)[:, None] * DIM + channels[None, :]
    end = batch * o_batch + head * o_head + to.to(tl.int64)[:, None] * DIM + channels[None, :]
    key = tl.load(keys + begin, mask=there)
    value = tl.load(values + begin, mask=there)
    tl.store(own_keys + end, key, mask=there)
    tl.store(own_values + end, value, mask=there)
    tl.store(positions + batch * p_batch + head * p_head + to, place, mask=exact)
    if rows is not None:
        packed = tl.load(count).to(tl.int32) if ON_DEVICE else count
        slot = tl.where(to < start, to, to + packed)
        slot = tl.where(exact, slot, start + to - own_slots)
        for row in range(REMEMBERED):
            remembered = rows + batch * r_batch + head * r_head + row * r_row + slot
            tl.store(remembered, 0.0, mask=come)


@triton.jit
def _weigh(
    logits, candidates, weights, wanted, filled,
    FIRST: tl.constexpr, RECENT: tl.constexpr, ROWS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    # Summed over rows, as whole numbers; those at the ends get most.
    every = tl.arange(0, ALL)
    real = every < wanted
    weight = tl.zeros((ALL,), tl.float32)
    for row in range(ROWS):
        logit = tl.load(logits + row * wanted + every, mask=real, other=-float("inf"))
        share = tl.exp(logit - tl.max(logit, 0))
        weight += share / tl.sum(share, 0)
    place = tl.load(candidates + every, mask=real, other=0)
    always = (place < FIRST) | (place >= filled - RECENT)
    weight = tl.where(always, float("inf"), weight)
    tl.store(weights + every, ascending(weight), mask=real)
    tl.debug_barrier()
