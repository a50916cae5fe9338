"""Entries that come back into a head group, from pinned memory, in the place of others."""

import triton
import triton.language as tl

from kvlite.ops.triton_largest import ascending, largest


@triton.jit
def is_packed(slot, start, packed):
    """Whether slots are those of a segment's entries, which begin behind the first few."""
    return (slot >= start) & (slot < start + packed)


@triton.jit
def own_slot(slot, start, packed):
    """Where slots that are not of a segment lie among the others."""
    return tl.where(slot < start, slot, slot - packed)


@triton.jit(do_not_specialize=["seen", "slots", "wanted", "count", "room"])
def choose(
    logits, candidates, in_slots, worth, seen, weights, best, coming, leaving, missing_of, came,
    slots, wanted, count, room,
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
    tl.atomic_add(came, missing)


@triton.jit(do_not_specialize=["room", "start", "packed"])
def move(
    coming, leaving, missing_of, keys, values, own_keys, own_values, positions, rows,
    k_batch, k_head, o_batch, o_head, p_batch, p_head, r_batch, r_head, r_row,
    room, start, packed,
    REMEMBERED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some of the entries that come into one KV head; what goes into a segment is not written."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = batch * tl.num_programs(1) + head
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    come = entries < tl.load(missing_of + line)
    place = tl.load(coming + line * room + entries, mask=come, other=0)
    to = tl.load(leaving + line * room + entries, mask=come, other=0)
    exact = come & ~is_packed(to, start, packed)
    own = own_slot(to, start, packed)
    channels = tl.arange(0, WIDE)
    there = exact[:, None] & (channels < DIM)[None, :]
    begin = batch * k_batch + head * k_head + place.to(tl.int64)[:, None] * DIM + channels[None, :]
    end = batch * o_batch + head * o_head + own.to(tl.int64)[:, None] * DIM + channels[None, :]
    key = tl.load(keys + begin, mask=there)
    value = tl.load(values + begin, mask=there)
    tl.store(own_keys + end, key, mask=there)
    tl.store(own_values + end, value, mask=there)
    tl.store(positions + batch * p_batch + head * p_head + own, place, mask=exact)
    if rows is not None:
        for row in range(REMEMBERED):
            remembered = rows + batch * r_batch + head * r_head + row * r_row + to
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
