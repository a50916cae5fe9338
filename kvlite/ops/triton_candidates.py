"""Candidates that a token may want back, named by their estimated attention, in two launches.

The first looks through all entries in groups of neighbors, and through what is held; the second
finds the largest of all entries among a few. The maxima of as many groups as entries are wanted are
themselves entries, so no entry below the least of these maxima is wanted.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.triton_largest import ascending, bound_of, largest

# Groups of neighbors, at most, which one program holds the maxima of.
GROUPS = 4096
SCANNED = 1024
CHOSEN_FROM = 2048
# Of the least maximum: rounded down, it lets a few more through, in half the time.
BITS = 18


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


def name_candidates(
    scores: Tensor,
    positions: Tensor,
    quantized: Tensor | None,
    seen: int | Tensor,
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor]:
    """Name the candidates of some KV heads.

    Args:
        scores: the estimated attention, `(batch, heads, n)` float32, for every position held.
        positions: of what is in slots, `(batch, heads, own slots)` int32.
        quantized: those of a segment's entries, whose slots are numbered behind these; or None.
        seen: how many entries there are, a number, or `(1,)` int64 on the device; at least
            `wanted.candidates`.

    Returns:
        For each line, a head of a sequence, the candidates, ascending, and the slots they are held
        in, or -1, `(lines, candidates)` int32 both; and what is held in each slot, `(lines, slots)`
        int32: the larger, the sooner it gives way, and never at 0.
    """
    batch, heads, entries = scores.shape
    packed, lines = 0 if quantized is None else quantized.shape[2], batch * heads
    own_slots, named = positions.shape[2], wanted.candidates
    slots = own_slots + packed
    neighbors = max(2, triton.next_power_of_2(-(-entries // GROUPS)))
    groups = -(-entries // neighbors)
    strides = (
        *scores.stride()[:2],
        *positions.stride()[:2],
        *((0, 0) if quantized is None else quantized.stride()[:2]),
    )

    def numbers(length: int) -> Tensor:
        return torch.empty(lines, length, dtype=torch.int32, device=scores.device)

    candidates, in_slots, worth = numbers(named), numbers(named), numbers(slots)
    slot_of, maxima, scanned = numbers(entries), numbers(groups), max(SCANNED, neighbors)
    _survey[-(-max(entries, slots) // scanned), heads, batch](
        scores, positions, quantized, seen, slot_of, maxima, worth,
        *strides,
        entries, slots, own_slots,
        ON_DEVICE=isinstance(seen, Tensor), NEIGHBORS=neighbors, SCANNED=scanned,
        num_warps=4,
    )  # fmt: skip
    _name[heads, batch](
        scores, positions, quantized, seen, slot_of, maxima, numbers(groups), numbers(entries),
        numbers(entries), numbers(named), candidates, in_slots,
        *strides,
        entries, slots, named, own_slots,
        ON_DEVICE=isinstance(seen, Tensor), FIRST=wanted.first, RECENT=wanted.recent,
        NEIGHBORS=neighbors, GROUPS=triton.next_power_of_2(groups), BITS=BITS, BLOCK=CHOSEN_FROM,
        num_warps=8,
    )  # fmt: skip
    return candidates, in_slots, worth


@triton.jit(do_not_specialize=["seen", "entries", "slots", "own_slots"])
def _survey(
    scores, positions, packed_positions, seen, slot_of, maxima, worth,
    s_batch, s_head, p_batch, p_head, c_batch, c_head,
    entries, slots, own_slots,
    ON_DEVICE: tl.constexpr, NEIGHBORS: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """Some entries of one KV head, and some slots: the maxima of groups, the slots that places are
    held in, and what is held there: the larger `worth`, the sooner it gives way, and never at 0."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = batch * tl.num_programs(1) + head
    scores += batch * s_batch + head * s_head
    positions += batch * p_batch + head * p_head
    if packed_positions is not None:
        packed_positions += batch * c_batch + head * c_head
    filled = tl.load(seen).to(tl.int32) if ON_DEVICE else seen
    at = tl.program_id(0) * SCANNED
    each = at + tl.arange(0, SCANNED)
    if at < filled:
        score = ascending(tl.load(scores + each, mask=each < filled, other=0.0))
        most = tl.max(tl.reshape(score, (SCANNED // NEIGHBORS, NEIGHBORS)), 1)
        groups = tl.cdiv(entries, NEIGHBORS)
        group = at // NEIGHBORS + tl.arange(0, SCANNED // NEIGHBORS)
        tl.store(maxima + line * groups + group, most, mask=group < groups)
    if at < slots:
        real = each < slots
        place = _place(positions, packed_positions, each, real, own_slots)
        tl.store(slot_of + line * entries + place, each, mask=real)
        score = ascending(tl.load(scores + place, mask=real, other=0.0))
        gives_way = tl.where(place < filled, 0x7F800000 - score, 0)
        tl.store(worth + line * slots + each, gives_way, mask=real)


@triton.jit(do_not_specialize=["seen", "entries", "slots", "wanted", "own_slots"])
def _name(
    scores, positions, packed_positions, seen, slot_of, maxima, near, reaching, places, best,
    candidates, in_slots,
    s_batch, s_head, p_batch, p_head, c_batch, c_head,
    entries, slots, wanted, own_slots,
    ON_DEVICE: tl.constexpr, FIRST: tl.constexpr, RECENT: tl.constexpr, NEIGHBORS: tl.constexpr,
    GROUPS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = batch * tl.num_programs(0) + head
    scores += batch * s_batch + head * s_head
    positions += batch * p_batch + head * p_head
    if packed_positions is not None:
        packed_positions += batch * c_batch + head * c_head
    slot_of += line * entries
    groups = tl.cdiv(entries, NEIGHBORS)
    near += line * groups
    reaching += line * entries
    places += line * entries
    best += line * wanted
    candidates += line * wanted
    in_slots += line * wanted
    filled = tl.load(seen).to(tl.int32) if ON_DEVICE else seen

    maxima += line * groups
    least, near_count = _near(maxima, near, tl.cdiv(filled, NEIGHBORS), wanted, GROUPS, BITS)
    # What others of these threads wrote is read from here on.
    tl.debug_barrier()
    reach = 0
    for at in range(0, near_count * NEIGHBORS, BLOCK):
        each = at + tl.arange(0, BLOCK)
        real = each < near_count * NEIGHBORS
        place = tl.load(near + each // NEIGHBORS, mask=real, other=0) * NEIGHBORS
        place += each % NEIGHBORS
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
        own = _place(positions, packed_positions, slot, there, own_slots)
        there = there & (own == place)
        tl.store(candidates + each, place, mask=real)
        tl.store(in_slots + each, tl.where(there, slot, -1), mask=real)


@triton.jit
def _near(maxima, near, groups, wanted, GROUPS: tl.constexpr, BITS: tl.constexpr):
    """A score that no entry wanted is below; and in how many groups there are any that reach it,
    of which `near` has the numbers."""
    group = tl.arange(0, GROUPS)
    most = tl.load(maxima + group, mask=group < groups, other=-1)
    least = bound_of(most, wanted, BITS)
    reaches = (most >= least).to(tl.int32)
    tl.store(near + tl.cumsum(reaches, 0) - 1, group, mask=reaches > 0)
    return least, tl.sum(reaches, 0)


@triton.jit
def _place(positions, packed_positions, slot, real, own_slots):
    inside = slot >= own_slots
    place = tl.load(positions + slot, mask=real & ~inside, other=-1)
    if packed_positions is not None:
        other = tl.load(packed_positions + slot - own_slots, mask=real & inside, other=-1)
        place = tl.where(inside, other, place)
    return place
