"""What blocks of packed weights say, compiled by numba: the codes and scales of some outputs.

Bytes lie input by input, as `numba_linear` has them. Codes are from 0 on: those that stand for
levels become the level's distance to the least one.
"""

import numpy as np

from kvlite.ops.blocks import (
    E2M1,
    GROUP,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    UNEVEN,
)
from kvlite.ops.numba_group import INPUTS, WIDTH, looking_up
from kvlite.ops.numba_jit import jitted

HALF = INPUTS
_LEAST = -min(UNEVEN), -min(E2M1)
_uneven = looking_up([level + _LEAST[0] for level in UNEVEN])
_e2m1 = looking_up([level + _LEAST[1] for level in E2M1])


@jitted
def has_halves(kind):
    """Whether the halves of 32 inputs have scales of their own."""
    return kind in (Q2_K, Q3_K, Q6_K)


@jitted
def read_codes(block, kind, group, codes):
    """A group's codes, `(32, outputs)`; there is room for a multiple of `WIDTH`."""
    five = kind in (Q5_0, Q5_1, Q5_K)
    for i in range(GROUP):
        row, shift, high, high_shift = _place(kind, group, i)
        line, made = block[row], codes[i]
        if kind == Q8_0:
            for k in range(line.size):
                made[k] = line[k]
            continue
        if five:
            _read_five(line, shift, block[high], np.uint8(1 << high_shift), made)
        elif kind == Q6_K:
            _read_six(line, shift, block[high], np.uint8(1 << high_shift), made)
        elif kind in (Q2_K, Q3_K):
            _read_two(line, shift, made)
            if kind == Q3_K:
                _join(block[high], np.uint8(1 << high_shift), np.uint8(4), made)
        else:
            _read_four(line, shift, made)
        if kind in (IQ4_NL, IQ4_XS):
            for k in range(0, line.size, WIDTH):
                _uneven(made.ctypes.data + k)
        elif kind == MXFP4:
            for k in range(0, line.size, WIDTH):
                _e2m1(made.ctypes.data + k)


@jitted
def _place(kind, group, i):
    # The row and shift of its low bits, and of its high ones.
    if kind == Q8_0:
        return 2 + i, 0, 0, 0
    if kind == Q6_K:
        far, own = group // 4, group % 4
        return 64 * far + 32 * (own % 2) + i, 4 * (own // 2), 128 + 32 * far + i, 2 * own
    if kind in (Q2_K, Q3_K):
        header = 16 if kind == Q2_K else 32
        return header + 32 * (group // 4) + i, 2 * (group % 4), i, group
    if kind in (Q4_K, Q5_K):
        header = 16 if kind == Q4_K else 48
        return header + 32 * (group // 2) + i, 4 * (group % 2), 16 + i, group
    if kind == IQ4_XS:
        return 8 + HALF * group + i % HALF, 4 * (i // HALF), 0, 0
    if kind == MXFP4:
        return 1 + i % HALF, 4 * (i // HALF), 0, 0
    minimum = 2 if kind in (Q4_1, Q5_1) else 0
    high = 4 if kind in (Q5_0, Q5_1) else 0
    return 2 + minimum + high + i % HALF, 4 * (i // HALF), 2 + minimum + i // 8, i % 8


@jitted
def _read_four(line, shift, made):
    """Codes of 4 bits. Bytes are shifted together where numbers are written out."""
    if shift:
        for k in range(line.size):
            made[k] = line[k] >> np.uint8(4)
    else:
        for k in range(line.size):
            made[k] = line[k] & np.uint8(15)


@jitted
def _read_five(line, shift, high, bit, made):
    """Codes of 5 bits, of which `bit` shows the highest."""
    if shift:
        for k in range(line.size):
            most = np.uint8(16) if high[k] & bit else np.uint8(0)
            made[k] = (line[k] >> np.uint8(4)) | most
    else:
        for k in range(line.size):
            most = np.uint8(16) if high[k] & bit else np.uint8(0)
            made[k] = (line[k] & np.uint8(15)) | most


@jitted
def _read_six(line, shift, high, bit, made):
    """Codes of 6 bits, of which `bit` and the next one show the highest two."""
    next_bit = np.uint8(bit << np.uint8(1))
    if shift:
        for k in range(line.size):
            more = np.uint8(16) if high[k] & bit else np.uint8(0)
            most = np.uint8(32) if high[k] & next_bit else np.uint8(0)
            made[k] = (line[k] >> np.uint8(4)) | more | most
    else:
        for k in range(line.size):
            more = np.uint8(16) if high[k] & bit else np.uint8(0)
            most = np.uint8(32) if high[k] & next_bit else np.uint8(0)
            made[k] = (line[k] & np.uint8(15)) | more | most


@jitted
def _read_two(line, shift, made):
    if shift == 0:
        for k in range(line.size):
            made[k] = line[k] & np.uint8(3)
    elif shift == 2:
        for k in range(line.size):
            made[k] = (line[k] >> np.uint8(2)) & np.uint8(3)
    elif shift == 4:
        for k in range(line.size):
            made[k] = (line[k] >> np.uint8(4)) & np.uint8(3)
    else:
        for k in range(line.size):
            made[k] = line[k] >> np.uint8(6)


@jitted
def _join(line, bit, worth, codes):
    # `bit` shows a high bit that is `worth` so much.
    for k in range(line.size):
        codes[k] |= worth if line[k] & bit else np.uint8(0)


@jitted
def read_base(block, kind, base):
    """A block's scale and, if it has one, its least weight or the scale of these."""
    if kind == MXFP4:
        _powers(block[0], base[0])
        return
    at = 208 if kind == Q6_K else 108 if kind == Q3_K else 80 if kind == Q2_K else 0
    _halves(block[at], block[at + 1], base[0])
    if kind in (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K):
        _halves(block[at + 2], block[at + 3], base[1])


@jitted
def _halves(low, high, out):
    for k in range(low.size):
        sign = np.uint32(high[k] & np.uint8(128)) << np.uint32(24)
        size = np.uint32(high[k] & np.uint8(127)) << np.uint32(21) | np.uint32(low[k]) << np.uint32(
            13
        )
        out[k] = np.uint32(sign | size).view(np.float32) * np.float32(2.0**112)


@jitted
def _powers(exponents, out):
    """Powers of 2, of exponents that are 128 too high."""
    for k in range(exponents.size):
        bits = np.uint32(exponents[k]) << np.uint32(23)
        # The two smallest are no normal numbers.
        tiny = np.uint32(0x200000) << np.uint32(exponents[k] & np.uint8(1))
        above = np.uint32(bits - np.uint32(0x800000))
        out[k] = np.uint32(above if exponents[k] > np.uint8(1) else tiny).view(np.float32)


@jitted
def read_scales(block, kind, group, half, base, scales):
    """The scales and offsets of 16 or 32 inputs."""
    scale, offset = scales[0], scales[1]
    part = 2 * group + half
    if kind == Q6_K:
        line = block[192 + part]
        for k in range(line.size):
            scale[k] = base[0, k] * np.float32(np.int8(line[k]))
            offset[k] = np.float32(-32) * scale[k]
    elif kind == Q2_K:
        line = block[part]
        for k in range(line.size):
            scale[k] = base[0, k] * np.float32(line[k] & np.uint8(15))
            offset[k] = -base[1, k] * np.float32(line[k] >> np.uint8(4))
    elif kind == Q3_K:
        low, high = block[96 + part % 8], block[104 + part % 4]
        _signed_scales(low, 4 * (part // 8), high, 2 * (part // 4), base[0], scale)
        for k in range(scale.size):
            offset[k] = np.float32(-4) * scale[k]
    elif kind == IQ4_XS:
        low, high = block[4 + group // 2], block[2 + group // 4]
        _signed_scales(low, 4 * (group % 2), high, 2 * (group % 4), base[0], scale)
        for k in range(scale.size):
            offset[k] = np.float32(-_LEAST[0]) * scale[k]
    elif kind in (Q4_K, Q5_K):
        low, least, both = block[4 + group % 4], block[8 + group % 4], block[12 + group % 4]
        if group < 4:
            _first_scales(low, least, base, scale, offset)
        else:
            _last_scales(low, least, both, base, scale, offset)
    elif kind != Q4_1 and kind != Q5_1:
        middle = np.float32(_middle(kind))
        for k in range(block.shape[1]):
            scale[k], offset[k] = base[0, k], -middle * base[0, k]


@jitted
def _first_scales(low, least, base, scale, offset):
    """Of Q4_K's and Q5_K's first 4 groups."""
    for k in range(low.size):
        scale[k] = base[0, k] * np.float32(low[k] & np.uint8(63))
        offset[k] = -base[1, k] * np.float32(least[k] & np.uint8(63))


@jitted
def _last_scales(low, least, both, base, scale, offset):
    """Of the last 4, whose high bits lie with the first ones'."""
    for k in range(low.size):
        step = (both[k] & np.uint8(15)) | ((low[k] >> np.uint8(2)) & np.uint8(48))
        by = (both[k] >> np.uint8(4)) | ((least[k] >> np.uint8(2)) & np.uint8(48))
        scale[k] = base[0, k] * np.float32(np.uint8(step))
        offset[k] = -base[1, k] * np.float32(np.uint8(by))


@jitted
def _signed_scales(low, low_shift, high, high_shift, base, scale):
    """Scales of 6 bits, the low 4 and the high 2 of which lie apart; 32 too high."""
    for k in range(low.size):
        bits = (np.int32(low[k]) >> np.int32(low_shift)) & np.int32(15)
        bits |= ((np.int32(high[k]) >> np.int32(high_shift)) & np.int32(3)) << np.int32(4)
        scale[k] = base[k] * np.float32(np.int32(bits - np.int32(32)))


@jitted
def _middle(kind):
    """The code of the level 0, where a block has no offsets."""
    if kind == Q4_0:
        return 8
    if kind == Q5_0:
        return 16
    if kind == Q8_0:
        return 128
    return _LEAST[1] if kind == MXFP4 else _LEAST[0]
