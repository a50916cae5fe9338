"""Products with quantized vectors, compiled for the processor: codes become numbers in registers.

numba compiles these loops at their first use, in a few seconds, and keeps the result on disk.
Without it, `Quantized` forms the same products from torch's functions, some four times as slowly.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.ops.numba_vectors import Loop, jitted

ROWS = 4
# Less is not worth waking a thread for, while torch's own are still looking for work.
CHANNELS_A_THREAD = 1 << 21
Part = tuple[int, int]


def dot(turned: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Products of rows with every vector, both rotated.

    Args:
        turned: `(heads, rows, dim)` float32.
        codes, scales, zeros: `(heads, n, dim * bits / 8)` uint8, and `(heads, groups, n)`; see
            `Quantized`.

    Returns:
        `(heads, rows, n)` float32.
    """
    (heads, rows, dim), count = turned.shape, codes.shape[1]
    loop = product_loop(bits, dim, scales.shape[1])
    padded = F.pad(turned, (0, 0, 0, -rows % ROWS))
    out = padded.new_empty(heads, padded.shape[1], count)
    given, made = _arrays(padded, codes, scales.float(), zeros.float()), out.numpy()
    in_threads(lambda part: loop(*given, *part, made), thread_parts(count, heads * dim))
    return out[:, :rows]


def weigh(weights: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Sums of all vectors by weights, still rotated.

    Args:
        weights: `(heads, rows, n)` float32.
        codes, scales, zeros: as for `dot`.

    Returns:
        `(heads, rows, dim)` float32.
    """
    heads, rows, count = weights.shape
    dim = codes.shape[2] * 8 // bits
    loop, parts = sum_loop(bits, dim, scales.shape[1]), thread_parts(count, heads * dim)
    given = _arrays(weights, codes, scales.float(), zeros.float())
    outs = weights.new_empty(len(parts), heads, rows, dim)
    made = dict(zip(parts, outs.numpy(), strict=True))
    in_threads(lambda part: loop(*given, *part, made[part]), parts)
    return outs.sum(0)


def _arrays(*tensors: Tensor) -> list[Any]:
    """One layout, whatever a tensor is a part of: loops are compiled for it."""
    return [tensor.contiguous().numpy() for tensor in tensors]


def thread_parts(count: int, channels: int) -> list[Part]:
    """Of `count` vectors, the first of each thread's share and the one after its last.

    Args:
        channels: of a vector, in all heads.
    """
    wanted = count * channels // CHANNELS_A_THREAD
    threads = max(1, min(torch.get_num_threads(), wanted))
    edges = [count * thread // threads for thread in range(threads + 1)]
    return list(pairwise(edges))


def in_threads(work: Callable[[Part], None], parts: list[Part]) -> None:
    """Do the work of each part in a thread of its own, the first in this one."""
    others = [_pool().submit(work, part) for part in parts[1:]]
    work(parts[0])
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="kvlite-products")


@cache
def product_loop(bits: int, dim: int, groups: int) -> Loop:
    """The loop for one form of codes, whose sizes are constants to the compiler.

    A byte has a code of each plane; `run` bytes in a row have codes of one group in every plane.
    """
    planes, size, mask = 8 // bits, dim // groups, 2**bits - 1
    width = dim // planes
    run = gcd(size, width)

    def loop(queries, codes, scales, zeros, first, last, out):
        for head in range(codes.shape[0]):
            for row in range(0, queries.shape[1], ROWS):
                for i in range(first, last):
                    a = b = c = d = np.float32(0)
                    for start in range(0, width, run):
                        for j in range(start, start + run):
                            for plane in range(planes):
                                group = (plane * width + start) // size
                                # A code is left in its place in the byte: its step is smaller.
                                code = np.uint8(codes[head, i, j] & np.uint8(mask << plane * bits))
                                step = scales[head, group, i] * np.float32(0.5 ** (plane * bits))
                                x = np.float32(code) * step + zeros[head, group, i]
                                at = plane * width + j
                                a += queries[head, row, at] * x
                                b += queries[head, row + 1, at] * x
                                c += queries[head, row + 2, at] * x
                                d += queries[head, row + 3, at] * x
                    out[head, row, i] = a
                    out[head, row + 1, i] = b
                    out[head, row + 2, i] = c
                    out[head, row + 3, i] = d

    return jitted(loop)


@cache
def sum_loop(bits: int, dim: int, groups: int) -> Loop:
    """As `product_loop`."""
    planes, size, mask = 8 // bits, dim // groups, 2**bits - 1
    width = dim // planes
    run = gcd(size, width)

    def loop(weights, codes, scales, zeros, first, last, out):
        end = weights.shape[1] - 1
        sums = np.empty((ROWS, dim), np.float32)
        for head in range(codes.shape[0]):
            for row in range(0, end + 1, ROWS):
                sums[:] = 0
                # Rows past the last repeat it, and what they sum up is not used.
                one, two, three = min(row + 1, end), min(row + 2, end), min(row + 3, end)
                for i in range(first, last):
                    a, b = weights[head, row, i], weights[head, one, i]
                    c, d = weights[head, two, i], weights[head, three, i]
                    for plane in range(planes):
                        for start in range(0, width, run):
                            group = (plane * width + start) // size
                            step = scales[head, group, i] * np.float32(0.5 ** (plane * bits))
                            zero = zeros[head, group, i]
                            for j in range(start, start + run):
                                code = np.uint8(codes[head, i, j] & np.uint8(mask << plane * bits))
                                x = np.float32(code) * step + zero
                                at = plane * width + j
                                sums[0, at] += a * x
                                sums[1, at] += b * x
                                sums[2, at] += c * x
                                sums[3, at] += d * x
                for k in range(min(ROWS, end + 1 - row)):
                    out[head, row + k] = sums[k]

    return jitted(loop)
