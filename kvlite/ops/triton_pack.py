"""Entries that come back into a quantized segment, rounded there, a program for each."""

from math import gcd
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from kvlite.cache.packed import Packed
    from kvlite.cache.quantization.hadamard import Hadamard

# Added to a small number and taken away again, it leaves a whole one.
TO_WHOLE = tl.constexpr(1.5 * 2**23)


def pack(
    segment: "Packed",
    rotation: Tensor,
    own_slots: int,
    own: slice,
    source: tuple[Tensor, Tensor],
    coming: Tensor,
    leaving: Tensor,
    missing: Tensor,
) -> None:
    """Round entries of some heads, those that leave the segment being replaced.

    Args:
        rotation: `(dim, dim)` float32, by which keys and values are turned before they are rounded.
        own_slots: how many slots come before the segment's.
        own: the heads.
        source: keys and values of these heads, `(batch, heads, places, dim)`.
        coming, leaving: places there, and the slots that become theirs, `(batch * heads, n)` int32.
        missing: how many of the n count, `(batch * heads,)` int32.
    """
    batch, heads, _, dim = source[0].shape
    k, v = segment.for_kernels
    all_heads = segment.positions.shape[1]
    with torch.cuda.device_of(coming):
        _pack[coming.shape[1], heads, batch](
            *source,
            coming, leaving, missing, segment.mean[:, own], rotation,
            *(each[:, own] for each in k.tensors),
            *(each[:, own] for each in v.tensors),
            segment.positions[:, own],
            *source[0].stride()[:2],
            all_heads, segment.positions.stride(1), own_slots, coming.shape[1],
            K_BITS=k.bits, V_BITS=v.bits, K_PART=_part(k), V_PART=_part(v), K_GROUP=k.group,
            V_GROUP=v.group, DIM=dim, WIDE=triton.next_power_of_2(dim),
            num_warps=8,
        )  # fmt: skip


def _part(vectors: "Hadamard") -> int:
    """Channels that share both a scale and the place of their bits within a byte."""
    return gcd(vectors.group, vectors.dim * vectors.bits // 8)


@triton.jit(do_not_specialize=["all_heads", "capacity", "own_slots", "room"])
def _pack(
    keys, values, coming, leaving, missing, mean, rotation, k_codes, k_scales, k_zeros, v_codes,
    v_scales, v_zeros, positions,
    s_batch, s_head,
    all_heads, capacity, own_slots, room,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_PART: tl.constexpr, V_PART: tl.constexpr,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One entry of one KV head, if its slot is the segment's."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    noted = batch * tl.num_programs(1) + head
    line = batch * all_heads + head
    entry = tl.program_id(0)
    if entry < tl.load(missing + noted):
        slot = tl.load(leaving + noted * room + entry)
        if slot >= own_slots:
            place = tl.load(coming + noted * room + entry)
            at = slot - own_slots
            every = tl.arange(0, WIDE)
            held = every < DIM
            begin = batch * s_batch + head * s_head + place.to(tl.int64) * DIM + every
            key = tl.load(keys + begin, mask=held, other=0.0).to(tl.float32)
            key -= tl.load(mean + line * DIM + every, mask=held, other=0.0)
            value = tl.load(values + begin, mask=held, other=0.0).to(tl.float32)
            _round(
                *(key, rotation, k_codes, k_scales, k_zeros, line * capacity, at, capacity),
                *(K_BITS, K_PART, K_GROUP, DIM, WIDE),
            )
            _round(
                *(value, rotation, v_codes, v_scales, v_zeros, line * capacity, at, capacity),
                *(V_BITS, V_PART, V_GROUP, DIM, WIDE),
            )
            tl.store(positions + line * capacity + at, place)


@triton.jit
def _round(
    vector, rotation, codes, scales, zeros, first, at, capacity,
    BITS: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # As `quantized` and `packed_codes` of `cache.quantized` do.
    WIDTH: tl.constexpr = DIM * BITS // 8
    GROUPS: tl.constexpr = DIM // GROUP
    levels: tl.constexpr = 2**BITS - 1
    lows, steps = (), ()
    for group in tl.static_range(GROUPS):
        low = tl.full((), float("inf"), tl.float32)
        high = -low
        for part in tl.static_range(GROUP // PART):
            turned = _turned(vector, rotation, group * GROUP + part * PART, PART, DIM, WIDE)
            low = tl.minimum(low, tl.min(turned, 0))
            high = tl.maximum(high, tl.max(turned, 0))
        zero = low.to(tl.float16)
        scale = tl.div_rn(high - low, levels * 1.0).to(tl.float16)
        to = first * GROUPS + group * capacity + at
        tl.store(scales + to, scale)
        tl.store(zeros + to, zero)
        step = scale.to(tl.float32)
        lows += (zero.to(tl.float32),)
        steps += (tl.where(step == 0, 1.0, step),)
    for block in tl.static_range(WIDTH // PART):
        packed = tl.zeros((PART,), tl.int32)
        for plane in tl.static_range(8 // BITS):
            turned = _turned(vector, rotation, plane * WIDTH + block * PART, PART, DIM, WIDE)
            low = lows[(plane * WIDTH + block * PART) // GROUP]
            code = tl.div_rn(turned - low, steps[(plane * WIDTH + block * PART) // GROUP])
            code = (code + TO_WHOLE) - TO_WHOLE
            code = tl.minimum(tl.maximum(code, 0.0), levels * 1.0)
            packed |= code.to(tl.int32) << (plane * BITS)
        to = (first + at) * WIDTH + block * PART + tl.arange(0, PART)
        tl.store(codes + to, packed.to(tl.uint8))


@triton.jit
def _turned(vector, rotation, first, PART: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Some channels of a rotated vector, as float16 holds them at most."""
    every = tl.arange(0, WIDE)
    turn = rotation + every[:, None] * DIM + (first + tl.arange(0, PART))[None, :]
    turn = tl.load(turn, mask=(every < DIM)[:, None], other=0.0)
    turned = tl.sum(vector[:, None] * turn, 0)
    return tl.minimum(tl.maximum(turned, -65504.0), 65504.0)
