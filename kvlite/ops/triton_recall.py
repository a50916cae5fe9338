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
from kvlite.ops.triton_pack import pack
from kvlite.ops.triton_replace import choose, is_packed, move, own_slot

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
    slots: int,
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
        held: on the device. A slot whose position is not below `seen` is free, and stays it.
        packed: its segment, if it has one, and what vectors are rotated by for it, `(dim, dim)`
            float32.
        slots: how many of the head group's are looked at.
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
    (batch, _, asked, dim), named = queries.shape, wanted.candidates
    wide, start, middle = triton.next_power_of_2(dim), 0, held.segment_len
    own_keys, own_values, own_positions = held.residuals
    if packed is not None:
        start = packed[0].start

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=queries.device)

    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(queries):
        for at, first, length in runs(held.heads):
            own, far, lines = slice(at, at + length), slice(first, first + length), batch * length
            positions = own_positions[:, own, : slots - middle]
            quantized = None if packed is None else packed[0].positions[:, own]
            candidates, in_slots, worth = name_candidates(
                scores[:, far], positions, quantized, start, seen, wanted
            )
            logits = torch.empty(lines, asked, named, device=queries.device)
            _compare[-(-named // COMPARED), length, batch](
                queries[:, own], keys[:, far], own_keys[:, own], candidates, in_slots, logits,
                scale,
                *queries.stride()[:3], *keys.stride()[:2], *own_keys.stride()[:2],
                named, start, middle,
                ROWS=asked, DIM=dim, WIDE=wide, TILE=COMPARED,
                num_warps=4,
            )  # fmt: skip
            coming, leaving = numbers(lines, wanted.count), numbers(lines, wanted.count)
            missing = numbers(lines)
            choose[length, batch](
                logits, candidates, in_slots, worth, seen, numbers(lines, named),
                numbers(lines, wanted.count), coming, leaving, missing, came, slots, named,
                wanted.count if writes else 0, wanted.count,
                ON_DEVICE=isinstance(seen, Tensor), FIRST=wanted.first, RECENT=wanted.recent,
                ROWS=asked, ALL=triton.next_power_of_2(named),
                SLOTS=min(CHOSEN_FROM, triton.next_power_of_2(slots)),
                num_warps=8,
            )  # fmt: skip
            move[-(-wanted.count // MOVED), length, batch](
                coming, leaving, missing, keys[:, far], values[:, far], own_keys[:, own],
                own_values[:, own], positions, None if held.rows is None else held.rows[:, own],
                *keys.stride()[:2], *own_keys.stride()[:2], *positions.stride()[:2],
                *((0, 0, 0) if held.rows is None else held.rows.stride()[:3]),
                wanted.count, start, middle,
                REMEMBERED=0 if held.rows is None else held.rows.shape[2], DIM=dim, WIDE=wide,
                TILE=MOVED,
                num_warps=4,
            )  # fmt: skip
            if packed is not None:
                pack(*packed, own, (keys[:, far], values[:, far]), coming, leaving, missing)


@triton.jit(do_not_specialize=["wanted", "start", "packed"])
def _compare(
    queries, keys, own_keys, candidates, in_slots, logits, scale,
    q_batch, q_head, q_row, k_batch, k_head, o_batch, o_head,
    wanted, start, packed,
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
