"""Products with 4- and 8-bit weights on a CPU, compiled by numba.

A weight is `code * scale + offset`, with a scale and an offset for every 32 inputs of an output.
Codes lie input by input, so that loops go over outputs, whose sums are independent of each other:
they are the same with any number of threads, and beside any other rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from kvlite.ops.numba_quant import in_threads, thread_parts
from kvlite.ops.numba_vectors import jitted, jitted_in_order

Array = np.ndarray
GROUP, HALF = 32, 16
# Outputs whose sums stay in the processor's cache; with several rows, the codes of a group, too.
BLOCK, BLOCK_OF_ROWS = 1 << 14, 1 << 11
# Rows for which 4-bit codes become numbers once.
ROWS = 4
LOW, HIGH, LESS = np.uint8(15), np.uint8(240), np.float32(1 / 16)


def multiplier(
    codes: Tensor, scales: Tensor, offsets: Tensor, bits: int
) -> Callable[[Array], Array]:
    """Products with packed weights; what need not be done for each is done here.

    Args:
        codes: `(inputs * bits / 8, outputs)` uint8. With 4 bits, a group has 16 rows: low halves
            are the codes of its first 16 inputs, high ones those of the rest.
        scales, offsets: `(inputs / 32, outputs)` float32.
        bits: 4 or 8.

    Returns:
        A function of contiguous rows `(n, inputs)` float32, which gives `(n, outputs)` float32.
    """
    loop = _multiply_4bit if bits == 4 else _multiply_8bit
    given, outputs = _arrays(codes, scales, offsets), codes.shape[1]
    parts = thread_parts(outputs, len(scales) * GROUP)

    def multiply(rows: Array) -> Array:
        out = np.empty((len(rows), outputs), np.float32)
        if len(parts) == 1:
            loop(rows, *given, 0, outputs, out)
        else:
            in_threads(lambda part: loop(rows, *given, *part, out), parts)
        return out

    return multiply


def unpack(
    codes: Tensor, scales: Tensor, offsets: Tensor, bits: int, first: int, last: int
) -> Tensor:
    """The weights of outputs from `first` to before `last`, `(inputs, last - first)` float32, of
    what `multiplier` takes."""
    out = scales.new_empty(len(scales) * GROUP, last - first)
    loop = _unpack_4bit if bits == 4 else _unpack_8bit
    loop(*_arrays(codes, scales, offsets), first, last, out.numpy())
    return out


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.numpy() for tensor in tensors]


@jitted_in_order
def _multiply_4bit(rows, codes, scales, offsets, first, last, out):
    fours = rows.shape[0] // ROWS * ROWS
    sums = np.empty((ROWS, min(last - first, BLOCK_OF_ROWS)), np.float32)
    for begin in range(first, last, BLOCK_OF_ROWS):
        end = min(begin + BLOCK_OF_ROWS, last)
        size = end - begin
        out[:, begin:end] = 0
        for group in range(scales.shape[0]):
            scale, offset = scales[group, begin:end], offsets[group, begin:end]
            row = 0
            while row < rows.shape[0]:
                count = ROWS if row < fours else 1
                x = rows[row : row + count, group * GROUP : (group + 1) * GROUP]
                sums[:count, :size] = 0
                for i in range(0, HALF, 4):
                    at = group * HALF + i
                    one, two = codes[at, begin:end], codes[at + 1, begin:end]
                    three, four = codes[at + 2, begin:end], codes[at + 3, begin:end]
                    if count == 1:
                        _add_4bit(one, two, three, four, _factors(x[0], i), sums[0])
                    else:
                        _add_4bit_rows(one, two, three, four, x, i, sums)
                for each in range(count):
                    _scale(sums[each], scale, offset, x[each], out[row + each, begin:end])
                row += count


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
def _halves(byte):
    """The low half of a byte, and the byte."""
    return np.float32(np.uint8(byte & LOW)), np.float32(byte)


@jitted_in_order
def _add_4bit(one, two, three, four, by, sums):
    """Add the products of four bytes with one row."""
    for k in range(one.size):
        a, b, c, d = _halves(one[k]), _halves(two[k]), _halves(three[k]), _halves(four[k])
        sums[k] = _plus(sums[k], by, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])


@jitted_in_order
def _add_4bit_rows(one, two, three, four, x, i, sums):
    """As `_add_4bit` for four rows, in the same order; codes become numbers once for all."""
    by, by1, by2, by3 = _factors(x[0], i), _factors(x[1], i), _factors(x[2], i), _factors(x[3], i)
    sums0, sums1, sums2, sums3 = sums[0], sums[1], sums[2], sums[3]
    for k in range(one.size):
        a, b, c, d = _halves(one[k]), _halves(two[k]), _halves(three[k]), _halves(four[k])
        sums0[k] = _plus(sums0[k], by, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])
        sums1[k] = _plus(sums1[k], by1, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])
        sums2[k] = _plus(sums2[k], by2, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])
        sums3[k] = _plus(sums3[k], by3, a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])


@jitted
def _multiply_8bit(rows, codes, scales, offsets, first, last, out):
    sums = np.empty(min(last - first, BLOCK), np.float32)
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        out[:, begin:end] = 0
        for group in range(scales.shape[0]):
            for row in range(rows.shape[0]):
                x = rows[row, group * GROUP : (group + 1) * GROUP]
                sums[:] = 0
                for i in range(0, GROUP, 4):
                    at = group * GROUP + i
                    _add_8bit(
                        codes[at, begin:end],
                        codes[at + 1, begin:end],
                        codes[at + 2, begin:end],
                        codes[at + 3, begin:end],
                        x[i : i + 4],
                        sums,
                    )
                scale, offset = scales[group, begin:end], offsets[group, begin:end]
                _scale(sums, scale, offset, x, out[row, begin:end])


@jitted
def _add_8bit(one, two, three, four, x, sums):
    a, b, c, d = x[0], x[1], x[2], x[3]
    for k in range(one.size):
        found = a * np.float32(one[k]) + b * np.float32(two[k])
        sums[k] += found + c * np.float32(three[k]) + d * np.float32(four[k])


@jitted
def _scale(sums, scale, offset, x, out):
    """Add a group's products with codes to the products with weights."""
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    for k in range(out.size):
        out[k] += sums[k] * scale[k] + total * offset[k]


@jitted
def _unpack_4bit(codes, scales, offsets, first, last, out):
    for group in range(scales.shape[0]):
        scale, offset = scales[group, first:last], offsets[group, first:last]
        for i in range(HALF):
            line = codes[group * HALF + i, first:last]
            low = out[group * GROUP + i]
            for k in range(line.size):
                low[k] = np.float32(np.uint8(line[k] & LOW)) * scale[k] + offset[k]
            high = out[group * GROUP + HALF + i]
            for k in range(line.size):
                high[k] = np.float32(np.uint8(line[k] & HIGH)) * LESS * scale[k] + offset[k]


@jitted
def _unpack_8bit(codes, scales, offsets, first, last, out):
    for group in range(scales.shape[0]):
        scale, offset = scales[group, first:last], offsets[group, first:last]
        for i in range(GROUP):
            line, made = codes[group * GROUP + i, first:last], out[group * GROUP + i]
            for k in range(line.size):
                made[k] = np.float32(line[k]) * scale[k] + offset[k]
