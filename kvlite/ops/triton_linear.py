"""Products with packed weights on CUDA: blocks as `ops.blocks` has them, unpacked in registers.

Of a product, a thread takes words of codes, of several outputs at the same inputs. A code is masked
in its place, and the word seen as a float32: bits of its fraction alone are a number below the
smallest normal one, the code times `2**(place - 149)`, which multiplies as fast and as exactly as
any. The input makes up for that, once for all outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.blocks import FORMATS, GROUP, BlockFormat

Q6_K, Q8_0 = tl.constexpr(FORMATS["Q6_K"].number), tl.constexpr(FORMATS["Q8_0"].number)
SIZE = tl.constexpr(GROUP)
# What products are multiplied by until they are summed up, so that inputs may be large.
SMALL = tl.constexpr(2.0**-60)
# Outputs and rows of a program, its threads when it multiplies, and groups that it unpacks at once.
OUTPUTS, ROWS, THREADS, GROUPS = 4, 4, 64, 8


def multiply(rows: Tensor, blocks: Tensor, form: BlockFormat) -> Tensor:
    """`rows @ weight.T`, `(n, outputs)`, of a few rows `(n, inputs)`.

    Args:
        rows: from a multiple of 8 bytes on.
        blocks: `(outputs, bytes of one)` uint8, from a multiple of 4 bytes on.
    """
    count, (outputs, width) = len(rows), blocks.shape
    out = rows.new_empty(count, outputs)
    parts = 4 if form.inputs == GROUP else 16 if form.name == "Q6_K" else 8
    units = width // form.nbytes * parts
    together = min(OUTPUTS, 1 << outputs.bit_length() - 1)
    at_once = min(ROWS, 1 << (count - 1).bit_length())
    # All of the threads have something to do each time, where sizes allow it.
    threads = min(THREADS, units & -units)
    threads = threads if threads >= 32 else THREADS
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(blocks):
        _multiply[-(-outputs // together), -(-count // at_once)](
            rows.contiguous(),
            blocks,
            out,
            outputs,
            count,
            **_constants(form, width),
            PARTS=parts,
            ROWS=at_once,
            OUTPUTS=together,
            UNITS=threads,
            num_warps=threads // 32,
        )
    return out


def unpack(blocks: Tensor, form: BlockFormat, out: Tensor) -> None:
    """The weights of blocks `(outputs, bytes of one)`, into `(outputs, inputs)` of any floating
    type."""
    outputs, width = blocks.shape
    with torch.cuda.device_of(blocks):
        _unpack[-(-outputs // OUTPUTS), -(-out.shape[1] // (GROUPS * GROUP))](
            blocks,
            out,
            outputs,
            **_constants(form, width),
            OUTPUTS=OUTPUTS,
            GROUPS=GROUPS,
            num_warps=4,
        )


def _constants(form: BlockFormat, width: int) -> dict[str, int | bool]:
    """What a kernel is compiled for, of blocks with `width` bytes an output."""
    return {
        "WIDTH": width,
        "KIND": form.number,
        "HIGH": form.high_bits > 0,
        "LEAST": form.has_least,
        "INPUTS": form.inputs,
        "NBYTES": form.nbytes,
    }


@triton.jit(do_not_specialize=["outputs", "count"])
def _multiply(
    rows,
    blocks,
    out,
    outputs,
    count,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HIGH: tl.constexpr,
    LEAST: tl.constexpr,
    INPUTS: tl.constexpr,
    NBYTES: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Products of some of `count` rows with some outputs. A unit is what a thread takes of an
    output at once, of which a block has `PARTS`."""
    total: tl.constexpr = WIDTH // NBYTES * PARTS
    # The last program begins early enough to end with the last output.
    first = tl.minimum(tl.program_id(0) * OUTPUTS, outputs - OUTPUTS)
    own = tl.arange(0, OUTPUTS)[None, :, None]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None, None]
    lines = blocks + first.to(tl.int64) * WIDTH
    inputs = rows + tl.minimum(row, count - 1) * (WIDTH // NBYTES * INPUTS)
    sums = tl.zeros([ROWS, OUTPUTS, UNITS], tl.float32)
    for start in range(0, total, UNITS):
        which = start + tl.arange(0, UNITS)[None, None, :]
        real = which < total
        unit = tl.minimum(which, total - 1) if total % UNITS else which
        block = lines + unit // PARTS * NBYTES + own * WIDTH
        x = inputs + unit // PARTS * INPUTS
        part = unit % PARTS
        EVEN: tl.constexpr = total % UNITS == 0
        if KIND == Q6_K:
            sums += _of_q6_k(x, block, part, real, EVEN)
        elif KIND == Q8_0:
            sums += _of_q8_0(x, block, part, real, EVEN)
        elif INPUTS > SIZE:
            sums += _of_q4_k(x, block, part, real, EVEN, HIGH)
        else:
            sums += _of_q4(x, block, part, real, EVEN, HIGH, LEAST)
    made = tl.sum(sums, axis=2) * (1 / SMALL)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    own = first + tl.arange(0, OUTPUTS)[None, :]
    tl.store(out + row * outputs + own, made.to(out.dtype.element_ty), mask=row < count)


@triton.jit
def _of_q4(x, block, part, real, EVEN: tl.constexpr, HIGH: tl.constexpr, LEAST: tl.constexpr):
    """A unit's share of products, `SMALL` times: of 4 inputs of a group's first half and those 16
    further on."""
    minimum: tl.constexpr = 4 if LEAST else 2
    near = _word(block + (minimum + 4 if HIGH else minimum) + 4 * part, LEAST)
    x += 4 * part
    if HIGH:
        high = _word(block + minimum, LEAST) >> 4 * part
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
        made = _half(block) * (near + far) + _half(block + 2) * sum_x
    else:
        made = _half(block) * (near + far - (16 if HIGH else 8) * sum_x)
    return made


@triton.jit
def _of_q8_0(x, block, part, real, EVEN: tl.constexpr):
    """Likewise, of 8 inputs in a row; codes are made to begin at 0 instead of -128."""
    x += 8 * part
    near = _word(block + 2 + 8 * part, False) ^ 0x80808080
    far = _word(block + 6 + 8 * part, False) ^ 0x80808080
    near, near_x = _dot(x, real, EVEN, near, 0, 8)
    far, far_x = _dot(x + 4, real, EVEN, far, 0, 8)
    return _half(block) * (near + far - 128 * SMALL * (near_x + far_x))


@triton.jit
def _of_q4_k(x, block, part, real, EVEN: tl.constexpr, HIGH: tl.constexpr):
    """Likewise, of 4 inputs of each of a block's 8 groups."""
    first, second, both = _word(block + 4, True), _word(block + 8, True), _word(block + 12, True)
    # A byte for each of the first 4 groups and of the last.
    steps = first & 0x3F3F3F3F, (both & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
    offsets = second & 0x3F3F3F3F, ((both >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)
    if HIGH:
        high = _word(block + 16 + 4 * part, True)
    x += 4 * part
    scaled, offset = 0.0, 0.0
    for group in tl.static_range(8):
        if group % 2 == 0:
            pair = _word(block + (48 if HIGH else 16) + 16 * group + 4 * part, True)
        if HIGH:
            bit = high << 4 - group if group < 4 else high >> group - 4
            codes = _joined(pair >> 4 * (group % 2), bit)
            by, sum_x = _dot(x + 32 * group, real, EVEN, codes, 0, 5)
        else:
            by, sum_x = _dot(x + 32 * group, real, EVEN, pair, 4 * (group % 2), 4)
        scaled += _byte(steps[group // 4], group % 4) * by
        offset += _by_code(sum_x, offsets[group // 4], 8 * (group % 4), 6)
    return _half(block) * scaled - _half(block + 2) * offset


@triton.jit
def _of_q6_k(x, block, part, real, EVEN: tl.constexpr):
    """Likewise, of 4 inputs of each of the 4 groups of half a block."""
    half, i = part // 8, 4 * (part % 8)
    even = _word(block + 64 * half + i, False)
    odd = _word(block + 64 * half + 32 + i, False)
    high = _word(block + 128 + 32 * half + i, False)
    x += 128 * half + i
    scaled = 0.0
    for group in tl.static_range(4):
        bits = high << 4 - 2 * group if group < 2 else high >> 2 * group - 4
        codes = _joined((odd if group % 2 else even) >> 4 * (group // 2), bits)
        by, sum_x = _dot(x + 32 * group, real, EVEN, codes, 0, 6)
        step = tl.load(block + 192 + 8 * half + 2 * group + i // 16).to(tl.int8, bitcast=True)
        scaled += step.to(tl.float32) * (by - 32 * SMALL * sum_x)
    return _half(block + 208) * scaled


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


@triton.jit
def _word(at, ALIGNED: tl.constexpr):
    """The 4 bytes at some places, uint32; in halves unless places are multiples of 4."""
    if ALIGNED:
        word = tl.load(at.to(tl.pointer_type(tl.uint32)))
    else:
        halves = at.to(tl.pointer_type(tl.uint16))
        word = tl.load(halves).to(tl.uint32) | (tl.load(halves + 1).to(tl.uint32) << 16)
    return word


@triton.jit
def _half(at, mask=None):
    """The float16 at some places, as float32."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=mask).to(tl.float32)


@triton.jit(do_not_specialize=["outputs"])
def _unpack(
    blocks,
    out,
    outputs,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HIGH: tl.constexpr,
    LEAST: tl.constexpr,
    INPUTS: tl.constexpr,
    NBYTES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Some inputs of some outputs."""
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total: tl.constexpr = WIDTH // NBYTES * INPUTS
    weights, at = _weights(
        blocks,
        own,
        outputs,
        tl.program_id(1) * GROUPS,
        WIDTH,
        KIND,
        HIGH,
        LEAST,
        INPUTS,
        NBYTES,
        total,
        GROUPS,
    )
    line = own.to(tl.int64)[:, None, None] * total
    real = (own < outputs)[:, None, None] & (at < total)
    tl.store(out + line + at, weights.to(out.dtype.element_ty), mask=real)


@triton.jit
def _weights(
    blocks,
    own,
    outputs,
    first,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HIGH: tl.constexpr,
    LEAST: tl.constexpr,
    INPUTS: tl.constexpr,
    NBYTES: tl.constexpr,
    total: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The weights of some outputs and groups from `first` on, `(outputs, groups, 32)`, 0 beyond the
    last; and the numbers of their inputs, `(1, groups, 32)`."""
    which = first + tl.arange(0, GROUPS)[None, :, None]
    group, i = which % (INPUTS // SIZE), tl.arange(0, SIZE)[None, None, :]
    lines = blocks + own.to(tl.int64)[:, None, None] * WIDTH
    block = lines + which // (INPUTS // SIZE) * NBYTES
    whole = (own < outputs)[:, None, None] & (which * SIZE < total)
    real = whole & (i >= 0)
    if KIND == Q8_0:
        codes = tl.load(block + 2 + i, mask=real, other=0).to(tl.int8, bitcast=True)
        weights = _half(block, whole) * codes.to(tl.float32)
    elif KIND == Q6_K:
        far, near = group // 4, group % 4
        codes = tl.load(block + 64 * far + 32 * (near % 2) + i, mask=real, other=0)
        high = tl.load(block + 128 + 32 * far + i, mask=real, other=0)
        codes = ((codes >> 4 * (near // 2)) & 15) | (((high >> 2 * near) & 3) << 4)
        steps = tl.load(block + 192 + 2 * group + i // 16, mask=real, other=0)
        scale = _half(block + 208, whole) * steps.to(tl.int8, bitcast=True).to(tl.float32)
        weights = scale * (codes.to(tl.float32) - 32)
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
        scale = _half(block, whole) * step.to(tl.float32)
        weights = scale * codes.to(tl.float32) - _half(block + 2, whole) * by.to(tl.float32)
    else:
        minimum: tl.constexpr = 2 if LEAST else 0
        five: tl.constexpr = 4 if HIGH else 0
        codes = tl.load(block + 2 + minimum + five + i % 16, mask=real, other=0)
        codes = (codes >> 4 * (i // 16)) & 15
        if HIGH:
            high = tl.load(block + 2 + minimum + i // 8, mask=real, other=0)
            codes = codes | (((high >> i % 8) & 1) << 4)
        scale = _half(block, whole)
        offset = _half(block + 2, whole) if LEAST else scale * (-16 if HIGH else -8)
        weights = scale * codes.to(tl.float32) + offset
    return weights, which * SIZE + i
