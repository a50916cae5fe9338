"""Vectors rounded to a few bits, one at a time, in float64.

A vector is turned by Hadamard's matrix, whose entry (i, j) is +1 or -1 as i and j have an even or
an odd number of binary ones in common, over the square root of its size; every `group` channels are
then rounded to whole steps from their least value to their greatest. Step and least value are kept
in half precision. Channels rounded by token groups, as in "KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache", section 3, are not turned.
"""

import numpy as np
from numpy.typing import ArrayLike

from .attention import FloatArray


def hadamard(dim: int) -> FloatArray:
    """As large a power of two as divides dim, repeated along the diagonal."""
    size = 1
    while dim % (2 * size) == 0:
        size *= 2
    matrix = np.zeros((dim, dim))
    for i in range(dim):
        for j in range(dim):
            if i // size == j // size:
                odd = bin((i % size) & (j % size)).count("1") % 2
                matrix[i, j] = (-1.0 if odd else 1.0) / size**0.5
    return matrix


def rounded(numbers: ArrayLike, bits: int) -> tuple[list[int], float, float]:
    """Whole steps of a group, the size of a step, and the least value."""
    values = [float(x) for x in np.asarray(numbers)]
    low = float(np.float16(min(values)))
    step = float(np.float16((max(values) - min(values)) / (2**bits - 1)))
    codes = []
    for value in values:
        steps = round((value - low) / step) if step else 0
        codes.append(min(max(steps, 0), 2**bits - 1))
    return codes, step, low


def turned_and_rounded(
    vector: ArrayLike, bits: int, group: int
) -> tuple[FloatArray, list[int], list[float]]:
    """The vector as it comes back, its codes, and the step of each channel's group."""
    x = np.asarray(vector, dtype=np.float64)
    matrix = hadamard(len(x))
    turned = matrix @ x
    back, codes, steps = [], [], []
    for first in range(0, len(x), group):
        part, step, low = rounded(turned[first : first + group], bits)
        codes += part
        steps += [step] * len(part)
        back += [code * step + low for code in part]
    return matrix.T @ np.array(back), codes, steps


def by_channel(keys: ArrayLike, bits: int, group: int) -> FloatArray:
    """Keys `(n, dim)`, each channel rounded over `group` tokens at a time."""
    x = np.asarray(keys, dtype=np.float64)
    back = np.empty_like(x)
    for first in range(0, len(x), group):
        for channel in range(x.shape[1]):
            codes, step, low = rounded(x[first : first + group, channel], bits)
            back[first : first + group, channel] = [code * step + low for code in codes]
    return back


def bytes_of(codes: list[int], bits: int) -> list[int]:
    """With p codes a byte, byte j holds channels j, j + dim / p, ..., the first lowest."""
    per_byte = 8 // bits
    width = len(codes) // per_byte
    packed = []
    for j in range(width):
        value = 0
        for plane in range(per_byte):
            value += codes[j + plane * width] * 2 ** (bits * plane)
        packed.append(value)
    return packed
