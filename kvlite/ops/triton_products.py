"""Products with packed weights on CUDA: what a thread makes of a part of a block, in registers.

A code is masked in its place, and the word seen as a float32: bits of its fraction alone are a
number below the smallest normal one, the code times `2**(place - 149)`, which multiplies as fast
and as exactly as any. The input makes up for that, once for all outputs.
"""

import triton
import triton.language as tl

from kvlite.ops.triton_blocks import (
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q6_K,
    Q8_0,
    SIZE,
    half,
    power,
    word,
    word_anywhere,
)

# What products are multiplied by until they are summed up, so that inputs may be large.
SMALL = tl.constexpr(2.0**-60)


@triton.jit
def unit_product(
    x, block, part, real, levels,
    EVEN: tl.constexpr, KIND: tl.constexpr, HIGH: tl.constexpr, LEAST: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """A unit's share of products, `SMALL` times: of a block's `part`, with rows whose inputs for
    the block begin at `x`; all of the inputs are there if they are `EVEN`, else the `real` ones."""
    if KIND == Q6_K:
        made = _of_q6_k(x, block, part, real, EVEN)
    elif KIND == Q8_0:
        made = _of_q8_0(x, block, part, real, EVEN)
    elif KIND == Q2_K:
        made = _of_q2_k(x, block, part, real, EVEN)
    elif KIND == Q3_K:
        made = _of_q3_k(x, block, part, real, EVEN)
    elif KIND == IQ4_XS:
        made = _of_iq4_xs(x, block, part, real, levels, EVEN)
    elif levels is not None:
        made = _of_levels(x, block, part, real, levels, EVEN, KIND == MXFP4)
    elif INPUTS > SIZE:
        made = _of_q4_k(x, block, part, real, EVEN, HIGH)
    else:
        made = _of_q4(x, block, part, real, EVEN, HIGH, LEAST)
    return made


@triton.jit
def _of_q4(x, block, part, real, EVEN: tl.constexpr, HIGH: tl.constexpr, LEAST: tl.constexpr):
    """Of 4 inputs of a group's first half and those 16 further on."""
    minimum: tl.constexpr = 4 if LEAST else 2
    near = word(block + (minimum + 4 if HIGH else minimum) + 4 * part, LEAST)
    x += 4 * part
    if HIGH:
        high = word(block + minimum, LEAST) >> 4 * part
        # Times this, bit i goes to bit 8 i + 4.
        far = _joined(near >> 4, ((high >> 16) & 15) * 0x02040810)
        near = _joined(near, (high & 15) * 0x02040810)
        near, near_x = _dot(x, real, EVEN, near, 0, 5)
        far, far_x = _dot(x + 16, real, EVEN, far, 0, 5)
    else:
        far, far_x = _dot(x + 16, real, EVEN, near, 4, 4)
        near, near_x = _dot(x, real, EVEN, near, 0, 4)
    sum_x = (near_x + far_x) * SMALL
    if LEAST:
        made = half(block) * (near + far) + half(block + 2) * sum_x
    else:
        made = half(block) * (near + far - (16 if HIGH else 8) * sum_x)
    return made


@triton.jit
def _of_q8_0(x, block, part, real, EVEN: tl.constexpr):
    """Likewise, of 8 inputs in a row; codes are made to begin at 0 instead of -128."""
    x += 8 * part
    near = word(block + 2 + 8 * part, False) ^ 0x80808080
    far = word(block + 6 + 8 * part, False) ^ 0x80808080
    near, near_x = _dot(x, real, EVEN, near, 0, 8)
    far, far_x = _dot(x + 4, real, EVEN, far, 0, 8)
    return half(block) * (near + far - 128 * SMALL * (near_x + far_x))


@triton.jit
def _of_q4_k(x, block, part, real, EVEN: tl.constexpr, HIGH: tl.constexpr):
    """Likewise, of 4 inputs of each of a block's 8 groups."""
    first, second, both = word(block + 4, True), word(block + 8, True), word(block + 12, True)
    # A byte for each of the first 4 groups and of the last.
    steps = first & 0x3F3F3F3F, (both & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
    offsets = second & 0x3F3F3F3F, ((both >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)
    if HIGH:
        high = word(block + 16 + 4 * part, True)
    x += 4 * part
    scaled, offset = 0.0, 0.0
    for group in tl.static_range(8):
        if group % 2 == 0:
            pair = word(block + (48 if HIGH else 16) + 16 * group + 4 * part, True)
        if HIGH:
            bit = high << 4 - group if group < 4 else high >> group - 4
            codes = _joined(pair >> 4 * (group % 2), bit)
            by, sum_x = _dot(x + 32 * group, real, EVEN, codes, 0, 5)
        else:
            by, sum_x = _dot(x + 32 * group, real, EVEN, pair, 4 * (group % 2), 4)
        scaled += _byte(steps[group // 4], group % 4) * by
        offset += _by_code(sum_x, offsets[group // 4], 8 * (group % 4), 6)
    return half(block) * scaled - half(block + 2) * offset


@triton.jit
def _of_q6_k(x, block, part, real, EVEN: tl.constexpr):
    """Likewise, of 4 inputs of each of the 4 groups of half a block."""
    far, i = part // 8, 4 * (part % 8)
    even = word(block + 64 * far + i, False)
    odd = word(block + 64 * far + 32 + i, False)
    high = word(block + 128 + 32 * far + i, False)
    x += 128 * far + i
    scaled = 0.0
    for group in tl.static_range(4):
        bits = high << 4 - 2 * group if group < 2 else high >> 2 * group - 4
        codes = _joined((odd if group % 2 else even) >> 4 * (group // 2), bits)
        by, sum_x = _dot(x + 32 * group, real, EVEN, codes, 0, 6)
        step = tl.load(block + 192 + 8 * far + 2 * group + i // 16).to(tl.int8, bitcast=True)
        scaled += step.to(tl.float32) * (by - 32 * SMALL * sum_x)
    return half(block + 208) * scaled


@triton.jit
def _of_q2_k(x, block, part, real, EVEN: tl.constexpr):
    """Likewise, of 4 inputs of each of the 4 groups of half a block."""
    far, i = part // 8, 4 * (part % 8)
    codes = word(block + 16 + 32 * far + i, True)
    scales = block + 8 * far
    first, last = word(scales, True) >> 8 * (i // 16), word(scales + 4, True) >> 8 * (i // 16)
    x += 128 * far + i
    scaled, offset = 0.0, 0.0
    for group in tl.static_range(4):
        by, sum_x = _dot(x + 32 * group, real, EVEN, codes, 2 * group, 2)
        both = (last if group // 2 else first) >> 16 * (group % 2)
        scaled += (both & 15).to(tl.float32) * by
        offset += _by_code(sum_x, both, 4, 4)
    return half(block + 80) * scaled - half(block + 82) * offset


@triton.jit
def _of_q3_k(x, block, part, real, EVEN: tl.constexpr):
    """Likewise."""
    far, i = part // 8, 4 * (part % 8)
    low = word(block + 32 + 32 * far + i, False)
    high = word(block + i, False) >> 4 * far
    ahead = 4 * far + 8 * (i // 16)
    first, last = word(block + 96, False) >> ahead, word(block + 100, False) >> ahead
    above = word(block + 104, False) >> ahead
    x += 128 * far + i
    scaled = 0.0
    for group in tl.static_range(4):
        bits = high << 2 - group if group < 3 else high >> 1
        codes = ((low >> 2 * group) & 0x03030303) | (bits & 0x04040404)
        by, sum_x = _dot(x + 32 * group, real, EVEN, codes, 0, 3)
        step = ((last if group // 2 else first) >> 16 * (group % 2)) & 15
        step |= ((above >> 16 * (group % 2) + 2 * (group // 2)) & 3) << 4
        scaled += (step.to(tl.float32) - 32) * (by - 4 * SMALL * sum_x)
    return half(block + 108) * scaled


@triton.jit
def _of_iq4_xs(x, block, part, real, levels, EVEN: tl.constexpr):
    """Likewise, of 4 inputs of each half of 4 groups."""
    far, i = part // 4, 4 * (part % 4)
    low = word(block + 4, True) >> 16 * far
    high = word(block, True) >> 16 + 8 * far
    x += 128 * far + i
    scaled = 0.0
    for group in tl.static_range(4):
        codes = word(block + 8 + 64 * far + 16 * group + i, True)
        own = x + 32 * group
        by = _dot_levels(own, real, EVEN, codes, 0, levels)
        by += _dot_levels(own + 16, real, EVEN, codes, 4, levels)
        step = ((low >> 4 * group) & 15) | (((high >> 2 * group) & 3) << 4)
        scaled += (step.to(tl.float32) - 32) * by
    return half(block) * scaled


@triton.jit
def _of_levels(x, block, part, real, levels, EVEN: tl.constexpr, IS_MXFP4: tl.constexpr):
    """Likewise, of 4 inputs of a group's first half and those 16 further on."""
    if IS_MXFP4:
        codes = word_anywhere(block + 1 + 4 * part)
        scale = power(block)
    else:
        codes = word(block + 2 + 4 * part, False)
        scale = half(block)
    x += 4 * part
    near = _dot_levels(x, real, EVEN, codes, 0, levels)
    return scale * (near + _dot_levels(x + 16, real, EVEN, codes, 4, levels))


@triton.jit
def _dot_levels(x, real, EVEN: tl.constexpr, words, AT: tl.constexpr, levels):
    """The sum of `SMALL * level * x` over 4 inputs from `x` on, of codes as in `_dot`."""
    a, b, c, d = _four(x, real, EVEN)
    total = tl.load(levels + ((words >> AT) & 15)) * a
    total += tl.load(levels + ((words >> AT + 8) & 15)) * b
    total += tl.load(levels + ((words >> AT + 16) & 15)) * c
    total += tl.load(levels + ((words >> AT + 24) & 15)) * d
    return total * SMALL


@triton.jit
def _dot(x, real, EVEN: tl.constexpr, words, AT: tl.constexpr, BITS: tl.constexpr):
    """The sum of `SMALL * code * x` over 4 inputs from `x` on, and that of `x`; a code has `BITS`
    bits from `AT` on in each byte of words."""
    a, b, c, d = _four(x, real, EVEN)
    total = _by_code(a, words, AT, BITS)
    total += _by_code(b, words, AT + 8, BITS)
    total += _by_code(c, words, AT + 16, BITS)
    total += _by_code(d, words, AT + 24, BITS)
    return total, a + b + c + d


@triton.jit
def _by_code(x, words, AT: tl.constexpr, BITS: tl.constexpr):
    """`SMALL * code * x`, of codes with `BITS` bits from `AT` on."""
    # Only the bits of a float's fraction will do.
    behind: tl.constexpr = 0 if AT + BITS <= 23 else 16
    at: tl.constexpr = AT - behind
    code = ((words >> behind) & (((1 << BITS) - 1) << at)).to(tl.float32, bitcast=True)
    return code * (x * (SMALL * 2.0 ** (149 - at)))


@triton.jit
def _four(x, real, EVEN: tl.constexpr):
    """4 inputs from `x` on, as float32; those of 16 bits are loaded at once."""
    kind: tl.constexpr = x.dtype.element_ty
    if kind.primitive_bitwidth == 16:
        both = _loaded(x.to(tl.pointer_type(tl.uint64)), real, EVEN)
        a, b = _two(both.to(tl.uint32), kind)
        c, d = _two((both >> 32).to(tl.uint32), kind)
    else:
        a, b = _loaded(x, real, EVEN), _loaded(x + 1, real, EVEN)
        c, d = _loaded(x + 2, real, EVEN), _loaded(x + 3, real, EVEN)
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _two(word, KIND: tl.constexpr):
    """The two numbers of 16 bits in a word."""
    low, high = word.to(tl.uint16), (word >> 16).to(tl.uint16)
    return low.to(KIND, bitcast=True), high.to(KIND, bitcast=True)


@triton.jit
def _loaded(at, real, EVEN: tl.constexpr):
    """What lies at some places, 0 unless it is real."""
    return tl.load(at) if EVEN else tl.load(at, mask=real, other=0)


@triton.jit
def _joined(low, high):
    """The low 4 bits of each byte of a word, and the high 4 of another's."""
    return (low & 0x0F0F0F0F) | (high & 0xF0F0F0F0)


@triton.jit
def _byte(word, which: tl.constexpr):
    """One of a word's bytes."""
    return ((word >> 8 * which) & 255).to(tl.float32)
