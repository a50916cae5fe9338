"""Products with 4- and 8-bit weights on a CPU, compiled by numba.

A weight is `code * scale + offset`, with a scale and an offset for every 32 inputs of an output.
Codes lie input by input, so that loops go over outputs, whose sums are independent of each other:
they are the same with any number of threads.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from kvlite.ops.numba_quant import in_threads, thread_parts
from kvlite.ops.numba_vectors import jitted

GROUP, HALF = 32, 16
# Outputs whose sums stay in the processor's cache.
BLOCK = 1 << 14
LOW, HIGH, LESS = np.uint8(15), np.uint8(240), np.float32(1 / 16)


def multiplier(
    codes: Tensor, scales: Tensor, offsets: Tensor, bits: int
) -> Callable[[Tensor], Tensor]:
    """Products with packed weights; what need not be done for each is done here.

    Args:
        codes: `(inputs * bits / 8, outputs)` uint8. With 4 bits, a group has 16 rows: low halves
            are the codes of its first 16 inputs, high ones those of the rest.
        scales, offsets: `(inputs / 32, outputs)` float32.
        bits: 4 or 8.

    Returns:
        A function of rows `(n, inputs)` float32, which gives `(n, outputs)` float32.
    """
    loop = _multiply_4bit if bits == 4 else _multiply_8bit
    given, outputs = _arrays(codes, scales, offsets), codes.shape[1]
    parts = thread_parts(outputs, len(scales) * GROUP)

    def multiply(rows: Tensor) -> Tensor:
        out = rows.new_empty(rows.shape[0], outputs)
        x, made = rows.contiguous().numpy(), out.numpy()
        if len(parts) == 1:
            loop(x, *given, 0, outputs, made)
        else:
            in_threads(lambda part: loop(x, *given, *part, made), parts)
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


@jitted
def _multiply_4bit(rows, codes, scales, offsets, first, last, out):
    sums = np.empty(min(last - first, BLOCK), np.float32)
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        out[:, begin:end] = 0
        for group in range(scales.shape[0]):
            for row in range(rows.shape[0]):
                x = rows[row, group * GROUP : (group + 1) * GROUP]
                sums[:] = 0
                for i in range(0, HALF, 4):
                    at = group * HALF + i
                    _add_4bit(
                        codes[at, begin:end],
                        codes[at + 1, begin:end],
                        codes[at + 2, begin:end],
                        codes[at + 3, begin:end],
                        x[i : i + 4],
                        x[HALF + i : HALF + i + 4],
                        sums,
                    )
                scale, offset = scales[group, begin:end], offsets[group, begin:end]
                _scale(sums, scale, offset, x, out[row, begin:end])


@jitted
def _add_4bit(one, two, three, four, x, other, sums):
    """Add products of four bytes in a row with the inputs `x` of their low halves and the `other`
    ones of their high halves, of which a byte is the sum."""
    e, f, g, h = other[0] * LESS, other[1] * LESS, other[2] * LESS, other[3] * LESS
    a, b, c, d = x[0] - e, x[1] - f, x[2] - g, x[3] - h
    for k in range(one.size):
        found = a * np.float32(np.uint8(one[k] & LOW)) + e * np.float32(one[k])
        found += b * np.float32(np.uint8(two[k] & LOW)) + f * np.float32(two[k])
        found += c * np.float32(np.uint8(three[k] & LOW)) + g * np.float32(three[k])
        found += d * np.float32(np.uint8(four[k] & LOW)) + h * np.float32(four[k])
        sums[k] += found


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
