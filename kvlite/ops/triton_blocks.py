"""What blocks of packed weights say, on CUDA: their words, scales and weights, in registers."""

import triton
import triton.language as tl

from kvlite.ops.blocks import FORMATS, GROUP

Q2_K, Q3_K, Q6_K, Q8_0, IQ4_XS, MXFP4 = (
    tl.constexpr(FORMATS[name].number)
    for name in ("Q2_K", "Q3_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4")
)
SIZE = tl.constexpr(GROUP)


@triton.jit
def word(at, ALIGNED: tl.constexpr):
    """The 4 bytes at some places, uint32; in halves unless places are multiples of 4."""
    if ALIGNED:
        word = tl.load(at.to(tl.pointer_type(tl.uint32)))
    else:
        halves = at.to(tl.pointer_type(tl.uint16))
        word = tl.load(halves).to(tl.uint32) | (tl.load(halves + 1).to(tl.uint32) << 16)
    return word


@triton.jit
def word_anywhere(at):
    """The 4 bytes at places that are multiples of nothing: of the words that have the first and the
    last of them."""
    ahead = at.to(tl.uint64) & 3
    words = at - ahead
    low = tl.load(words.to(tl.pointer_type(tl.uint32))).to(tl.uint64)
    words += (ahead + 3) // 4 * 4
    high = tl.load(words.to(tl.pointer_type(tl.uint32))).to(tl.uint64)
    return (((high << 32) | low) >> (8 * ahead)).to(tl.uint32)


@triton.jit
def half(at, mask=None):
    """The float16 at some places, as float32."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=mask).to(tl.float32)


@triton.jit
def power(at, mask=None):
    """The power of 2 whose exponent, 128 too high, is the byte at some places."""
    exponent = tl.load(at, mask=mask).to(tl.int32)
    # The two smallest are no normal numbers.
    bits = tl.where(exponent < 2, 0x200000 << (exponent & 1), (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weights_of(
    blocks, levels, own, outputs, first,
    WIDTH: tl.constexpr, KIND: tl.constexpr, HIGH: tl.constexpr, LEAST: tl.constexpr,
    INPUTS: tl.constexpr, NBYTES: tl.constexpr, total: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The weights of some outputs and groups from `first` on, `(outputs, groups, 32)`, 0 beyond the
    last; and the numbers of their inputs, `(1, groups, 32)`. `levels` are those of 16 codes, if
    the format has some."""
    which = first + tl.arange(0, GROUPS)[None, :, None]
    group, i = which % (INPUTS // SIZE), tl.arange(0, SIZE)[None, None, :]
    lines = blocks + own.to(tl.int64)[:, None, None] * WIDTH
    block = lines + which // (INPUTS // SIZE) * NBYTES
    whole = (own < outputs)[:, None, None] & (which * SIZE < total)
    real = whole & (i >= 0)
    if KIND == Q8_0:
        codes = tl.load(block + 2 + i, mask=real, other=0).to(tl.int8, bitcast=True)
        weights = half(block, whole) * codes.to(tl.float32)
    elif KIND == Q6_K:
        far, near = group // 4, group % 4
        codes = tl.load(block + 64 * far + 32 * (near % 2) + i, mask=real, other=0)
        high = tl.load(block + 128 + 32 * far + i, mask=real, other=0)
        codes = ((codes >> 4 * (near // 2)) & 15) | (((high >> 2 * near) & 3) << 4)
        steps = tl.load(block + 192 + 2 * group + i // 16, mask=real, other=0)
        scale = half(block + 208, whole) * steps.to(tl.int8, bitcast=True).to(tl.float32)
        weights = scale * (codes.to(tl.float32) - 32)
    elif KIND == Q2_K:
        codes = tl.load(block + 16 + 32 * (group // 4) + i, mask=real, other=0)
        codes = (codes >> 2 * (group % 4)) & 3
        both = tl.load(block + 2 * group + i // 16, mask=real, other=0)
        scale = half(block + 80, whole) * (both & 15).to(tl.float32)
        offset = half(block + 82, whole) * (both >> 4).to(tl.float32)
        weights = scale * codes.to(tl.float32) - offset
    elif KIND == Q3_K:
        codes = tl.load(block + 32 + 32 * (group // 4) + i, mask=real, other=0)
        high = tl.load(block + i, mask=real, other=0)
        codes = ((codes >> 2 * (group % 4)) & 3) | (((high >> group) & 1) << 2)
        part = 2 * group + i // 16
        low = tl.load(block + 96 + part % 8, mask=real, other=0) >> 4 * (part // 8)
        high = tl.load(block + 104 + part % 4, mask=real, other=0) >> 2 * (part // 4)
        step = ((low & 15) | ((high & 3) << 4)).to(tl.float32) - 32
        weights = half(block + 108, whole) * step * (codes.to(tl.float32) - 4)
    elif KIND == IQ4_XS:
        codes = tl.load(block + 8 + 16 * group + i % 16, mask=real, other=0)
        codes = (codes >> 4 * (i // 16)) & 15
        low = tl.load(block + 4 + group // 2, mask=whole, other=0) >> 4 * (group % 2)
        high = tl.load(block + 2 + group // 4, mask=whole, other=0) >> 2 * (group % 4)
        step = ((low & 15) | ((high & 3) << 4)).to(tl.float32) - 32
        weights = half(block, whole) * step * tl.load(levels + codes)
    elif levels is not None:
        codes = tl.load(block + NBYTES - 16 + i % 16, mask=real, other=0)
        codes = (codes >> 4 * (i // 16)) & 15
        scale = power(block, whole) if KIND == MXFP4 else half(block, whole)
        weights = scale * tl.load(levels + codes)
    elif INPUTS > SIZE:
        start: tl.constexpr = 48 if HIGH else 16
        codes = tl.load(block + start + 32 * (group // 2) + i, mask=real, other=0)
        codes = (codes >> 4 * (group % 2)) & 15
        if HIGH:
            high = tl.load(block + 16 + i, mask=real, other=0)
            codes = codes | (((high >> group) & 1) << 4)
        low = tl.load(block + 4 + group % 4, mask=whole, other=0)
        least = tl.load(block + 8 + group % 4, mask=whole, other=0)
        both = tl.load(block + 12 + group % 4, mask=whole, other=0)
        step = tl.where(group < 4, low & 63, (both & 15) | ((low >> 2) & 48))
        by = tl.where(group < 4, least & 63, (both >> 4) | ((least >> 2) & 48))
        scale = half(block, whole) * step.to(tl.float32)
        weights = scale * codes.to(tl.float32) - half(block + 2, whole) * by.to(tl.float32)
    else:
        minimum: tl.constexpr = 2 if LEAST else 0
        five: tl.constexpr = 4 if HIGH else 0
        codes = tl.load(block + 2 + minimum + five + i % 16, mask=real, other=0)
        codes = (codes >> 4 * (i // 16)) & 15
        if HIGH:
            high = tl.load(block + 2 + minimum + i // 8, mask=real, other=0)
            codes = codes | (((high >> i % 8) & 1) << 4)
        scale = half(block, whole)
        offset = half(block + 2, whole) if LEAST else scale * (-16 if HIGH else -8)
        weights = scale * codes.to(tl.float32) + offset
    return weights, which * SIZE + i
