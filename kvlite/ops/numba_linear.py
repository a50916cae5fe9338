"""Products with packed weights on a CPU, compiled by numba: blocks as `ops.blocks` has them.

Bytes lie input by input, so that loops go over outputs, whose sums are independent of each other:
they are the same with any number of threads, and beside any other rows.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from kvlite.ops.blocks import GROUP, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, BlockFormat
from kvlite.ops.numba_quant import in_threads, thread_parts
from kvlite.ops.numba_vectors import jitted, jitted_in_order

Array = np.ndarray
HALF = 16
# Outputs whose codes and sums stay in the processor's cache.
BLOCK = 1 << 11
# Rows for which codes become numbers once.
ROWS = 4
LOW, LESS = np.uint8(15), np.float32(1 / 16)


def multiplier(blocks: Tensor, form: BlockFormat) -> Callable[[Array], Array]:
    """Products with packed weights; what need not be done for each is done here.

    Args:
        blocks: `(bytes of an output, outputs)` uint8.

    Returns:
        A function of contiguous rows `(n, inputs)` float32, which gives `(n, outputs)` float32.
    """
    given, outputs = blocks.numpy(), blocks.shape[1]
    parts = thread_parts(outputs, len(blocks) // form.nbytes * form.inputs)
    numbers = form.number, form.inputs, form.nbytes

    def multiply(rows: Array) -> Array:
        out = np.empty((len(rows), outputs), np.float32)
        if len(parts) == 1:
            _multiply(rows, given, *numbers, 0, outputs, out)
        else:
            in_threads(lambda part: _multiply(rows, given, *numbers, *part, out), parts)
        return out

    return multiply


def unpack(blocks: Tensor, form: BlockFormat, first: int, last: int, out: Tensor) -> None:
    """The weights of outputs from `first` to before `last`, into `(inputs, last - first)` float32,
    of what `multiplier` takes."""
    _unpack(blocks.numpy(), form.number, form.inputs, form.nbytes, first, last, out.numpy())


@jitted_in_order
def _multiply(rows, blocks, kind, inputs, nbytes, first, last, out):
    halves, width = 2 if kind == Q6_K else 1, min(last - first, BLOCK)
    size, bytewise = GROUP // halves, kind in (Q4_0, Q4_1)
    codes, sums = np.empty((GROUP, width), np.uint8), np.empty((ROWS, width), np.float32)
    base = np.empty((2, width), np.float32)
    scales = base if kind in (Q4_1, Q5_1) else np.empty((2, width), np.float32)
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        out[:, begin:end] = 0
        for number in range(blocks.shape[0] // nbytes):
            block = blocks[number * nbytes : (number + 1) * nbytes, begin:end]
            _read_base(block, kind, base)
            for group in range(inputs // GROUP):
                if bytewise:
                    read = block[nbytes - HALF :]
                elif kind == Q8_0:
                    read = block[2:]
                else:
                    _read_codes(block, kind, group, codes)
                    read = codes[:, : end - begin]
                for half in range(halves):
                    _read_scales(block, kind, group, half, base, scales)
                    at = number * inputs + group * GROUP + half * size
                    own, row = read[half * size : (half + 1) * size], 0
                    while row < rows.shape[0]:
                        count = ROWS if row + ROWS <= rows.shape[0] else 1
                        x = rows[row : row + count, at : at + size]
                        _add(own, x, bytewise, sums)
                        for each in range(count):
                            _scale(sums[each], scales, x[each], out[row + each, begin:end])
                        row += count


@jitted_in_order
def _add(codes, x, bytewise, sums):
    """The products of a group's codes, or of bytes with two of them, with one row or four."""
    sums[: len(x), : codes.shape[1]] = 0
    for i in range(0, len(codes), 4):
        one, two, three, four = codes[i], codes[i + 1], codes[i + 2], codes[i + 3]
        if bytewise and len(x) == 1:
            _add_bytes(one, two, three, four, _factors(x[0], i), sums[0])
        elif bytewise:
            _add_bytes_4(one, two, three, four, x, i, sums)
        elif len(x) == 1:
            _add_codes(one, two, three, four, x[0, i : i + 4], sums[0])
        else:
            _add_codes_4(one, two, three, four, x[:, i : i + 4], sums)


@jitted_in_order
def _add_codes(one, two, three, four, x, sums):
    a, b, c, d = x[0], x[1], x[2], x[3]
    for k in range(one.size):
        codes = np.float32(one[k]), np.float32(two[k]), np.float32(three[k]), np.float32(four[k])
        sums[k] = sums[k] + a * codes[0] + b * codes[1] + c * codes[2] + d * codes[3]


@jitted_in_order
def _add_codes_4(one, two, three, four, x, sums):
    """As `_add_codes` for four rows, in the same order; codes become numbers once for all."""
    (a, b, c, d), (e, f, g, h) = x[0], x[1]
    (a2, b2, c2, d2), (e2, f2, g2, h2) = x[2], x[3]
    sums0, sums1, sums2, sums3 = sums[0], sums[1], sums[2], sums[3]
    for k in range(one.size):
        codes = np.float32(one[k]), np.float32(two[k]), np.float32(three[k]), np.float32(four[k])
        sums0[k] = sums0[k] + a * codes[0] + b * codes[1] + c * codes[2] + d * codes[3]
        sums1[k] = sums1[k] + e * codes[0] + f * codes[1] + g * codes[2] + h * codes[3]
        sums2[k] = sums2[k] + a2 * codes[0] + b2 * codes[1] + c2 * codes[2] + d2 * codes[3]
        sums3[k] = sums3[k] + e2 * codes[0] + f2 * codes[1] + g2 * codes[2] + h2 * codes[3]


@jitted_in_order
def _factors(x, i):
    """What four bytes in a row, whose low halves are the codes of inputs i to i + 3, are multiplied
    by: each low half, and the byte, which is a sum of both halves."""
    e, f = x[HALF + i] * LESS, x[HALF + i + 1] * LESS
    g, h = x[HALF + i + 2] * LESS, x[HALF + i + 3] * LESS
    return x[i] - e, e, x[i + 1] - f, f, x[i + 2] - g, g, x[i + 3] - h, h


@jitted_in_order
def _plus(total, by, low, whole, low2, whole2, low3, whole3, low4, whole4):
    """A sum with the products of four bytes."""
    total += by[0] * low
    total += by[1] * whole
    total += by[2] * low2
    total += by[3] * whole2
    total += by[4] * low3
    total += by[5] * whole3
    total += by[6] * low4
    total += by[7] * whole4
    return total


@jitted_in_order
def _halves_of(byte):
    """The low half of a byte, and the byte."""
    return np.float32(np.uint8(byte & LOW)), np.float32(byte)


@jitted_in_order
def _add_bytes(one, two, three, four, by, sums):
    for k in range(one.size):
        a, b = _halves_of(one[k]), _halves_of(two[k])
        c, d = _halves_of(three[k]), _halves_of(four[k])
        sums[k] = _plus(sums[k], by, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])


@jitted_in_order
def _add_bytes_4(one, two, three, four, x, i, sums):
    """As `_add_bytes` for four rows, in the same order."""
    by, by1, by2, by3 = _factors(x[0], i), _factors(x[1], i), _factors(x[2], i), _factors(x[3], i)
    sums0, sums1, sums2, sums3 = sums[0], sums[1], sums[2], sums[3]
    for k in range(one.size):
        a, b = _halves_of(one[k]), _halves_of(two[k])
        c, d = _halves_of(three[k]), _halves_of(four[k])
        sums0[k] = _plus(sums0[k], by, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])
        sums1[k] = _plus(sums1[k], by1, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])
        sums2[k] = _plus(sums2[k], by2, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])
        sums3[k] = _plus(sums3[k], by3, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])


@jitted_in_order
def _scale(sums, scales, x, out):
    """Add a group's products with codes to the products with weights."""
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    scale, offset = scales[0], scales[1]
    for k in range(out.size):
        out[k] += sums[k] * scale[k] + total * offset[k]


@jitted
def _unpack(blocks, kind, inputs, nbytes, first, last, out):
    codes = np.empty((GROUP, last - first), np.uint8)
    base = np.empty((2, last - first), np.float32)
    scales = base if kind in (Q4_1, Q5_1) else np.empty((2, last - first), np.float32)
    for number in range(blocks.shape[0] // nbytes):
        block = blocks[number * nbytes : (number + 1) * nbytes, first:last]
        _read_base(block, kind, base)
        for group in range(inputs // GROUP):
            _read_codes(block, kind, group, codes)
            for i in range(GROUP):
                if i % HALF == 0:
                    _read_scales(block, kind, group, i // HALF, base, scales)
                made, line = out[number * inputs + group * GROUP + i], codes[i]
                scale, offset = scales[0], scales[1]
                for k in range(made.size):
                    made[k] = np.float32(line[k]) * scale[k] + offset[k]


@jitted
def _place(kind, group, i):
    """Where the code of a group's input lies: the row and shift of its low bits, and of its high
    ones."""
    if kind == Q8_0:
        return 2 + i, 0, 0, 0
    if kind == Q6_K:
        far, own = group // 4, group % 4
        return 64 * far + 32 * (own % 2) + i, 4 * (own // 2), 128 + 32 * far + i, 2 * own
    if kind in (Q4_K, Q5_K):
        header = 16 if kind == Q4_K else 48
        return header + 32 * (group // 2) + i, 4 * (group % 2), 16 + i, group
    minimum = 2 if kind in (Q4_1, Q5_1) else 0
    high = 4 if kind in (Q5_0, Q5_1) else 0
    return 2 + minimum + high + i % HALF, 4 * (i // HALF), 2 + minimum + i // 8, i % 8


@jitted
def _read_codes(block, kind, group, codes):
    """A group's codes, `(32, outputs)`, from 0 on."""
    more = kind in (Q5_0, Q5_1, Q5_K, Q6_K)
    for i in range(GROUP):
        row, shift, high, high_shift = _place(kind, group, i)
        line, made = block[row], codes[i]
        if kind == Q8_0:
            made[:] = line
            continue
        if shift:
            for k in range(line.size):
                made[k] = line[k] >> np.uint8(4)
        else:
            for k in range(line.size):
                made[k] = line[k] & np.uint8(15)
        if more:
            second = np.uint8(2 << high_shift) if kind == Q6_K else np.uint8(0)
            _join(block[high], np.uint8(1 << high_shift), second, made)


@jitted
def _join(line, first, second, codes):
    """Put one or two high bits, which `first` and `second` show, over codes of 4 bits."""
    for k in range(line.size):
        more = np.uint8(16) if line[k] & first else np.uint8(0)
        most = np.uint8(32) if line[k] & second else np.uint8(0)
        codes[k] |= more | most


@jitted
def _read_base(block, kind, base):
    """A block's scale and, if it has one, its least weight or the scale of these."""
    at = 208 if kind == Q6_K else 0
    _halves(block[at], block[at + 1], base[0])
    if kind in (Q4_1, Q5_1, Q4_K, Q5_K):
        _halves(block[2], block[3], base[1])


@jitted
def _halves(low, high, out):
    for k in range(low.size):
        sign = np.uint32(high[k] & np.uint8(128)) << np.uint32(24)
        size = np.uint32(high[k] & np.uint8(127)) << np.uint32(21) | np.uint32(low[k]) << np.uint32(
            13
        )
        out[k] = np.uint32(sign | size).view(np.float32) * np.float32(2.0**112)


@jitted
def _read_scales(block, kind, group, half, base, scales):
    """The scales and offsets of 16 or 32 inputs."""
    scale, offset = scales[0], scales[1]
    if kind == Q6_K:
        line = block[192 + 2 * group + half]
        for k in range(line.size):
            scale[k] = base[0, k] * np.float32(np.int8(line[k]))
            offset[k] = np.float32(-32) * scale[k]
    elif kind in (Q4_K, Q5_K):
        low, least, both = block[4 + group % 4], block[8 + group % 4], block[12 + group % 4]
        for k in range(low.size):
            if group < 4:
                step, by = low[k] & np.uint8(63), least[k] & np.uint8(63)
            else:
                step = (both[k] & np.uint8(15)) | ((low[k] >> np.uint8(2)) & np.uint8(48))
                by = (both[k] >> np.uint8(4)) | ((least[k] >> np.uint8(2)) & np.uint8(48))
            scale[k] = base[0, k] * np.float32(np.uint8(step))
            offset[k] = -base[1, k] * np.float32(np.uint8(by))
    elif kind != Q4_1 and kind != Q5_1:
        middle = np.float32(8 if kind == Q4_0 else 16 if kind == Q5_0 else 128)
        for k in range(block.shape[1]):
            scale[k], offset[k] = base[0, k], -middle * base[0, k]
