"""Products with all of many quantized vectors, compiled for the processor and shared by threads.

numba compiles these loops at their first use, in a few seconds, and keeps the result on disk.
Without it, `Quantized` forms the same products from torch's functions, some four times as slowly.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlite.ops.numba_codes import multiply_codes, weigh_codes
from kvlite.ops.numba_jit import jitted

# Less is not worth waking a thread for, while torch's own are still looking for work.
CHANNELS_A_THREAD = 1 << 21
Part = tuple[int, int]


def dot(turned: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Products of rows with every vector, both rotated.

    Args:
        turned: `(heads, rows, dim)` float32.
        codes, scales, zeros: `(heads, n, dim * bits / 8)` uint8, and `(heads, groups, n)` float16;
            see `Quantized`.

    Returns:
        `(heads, rows, n)` float32.
    """
    (heads, rows, dim), count = turned.shape, codes.shape[1]
    out = turned.new_empty(heads, rows, count)
    given, made = _arrays(turned, codes, scales, zeros), out.numpy()
    in_threads(lambda part: _dot(*given, bits, *part, made), thread_parts(count, heads * dim))
    return out


@jitted
def _dot(turned, codes, scales, zeros, bits, first, last, out):
    places = np.arange(first, last)
    for head in range(len(codes)):
        side = codes[head], scales[head], zeros[head]
        multiply_codes(turned[head], side, places, bits, out[head], first)


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
    parts, given = thread_parts(count, heads * dim), _arrays(weights, codes, scales, zeros)
    outs = weights.new_zeros(len(parts), heads, rows, dim)
    made = dict(zip(parts, outs.numpy(), strict=True))
    in_threads(lambda part: _weigh(*given, bits, *part, made[part]), parts)
    return outs.sum(0)


@jitted
def _weigh(weights, codes, scales, zeros, bits, first, last, out):
    places = np.arange(first, last)
    for head in range(len(codes)):
        side = codes[head], scales[head], zeros[head]
        weigh_codes(weights[head], first, side, places, bits, out[head])


def _arrays(rows: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> list[Any]:
    """One layout, whatever a tensor is a part of: loops are compiled for it."""
    halves = (each.contiguous().numpy().view(np.uint16) for each in (scales, zeros))
    return [*(each.contiguous().numpy() for each in (rows, codes)), *halves]


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
    try:
        work(parts[0])
    finally:
        wait(others)
    for other in others:
        other.result()


def in_turn(work: Callable[[int], None], items: Sequence[int]) -> None:
    """Do the work of each item, in as many threads as torch has: who is done takes the next one.
    After an error nobody begins another."""
    waiting = iter(items)

    def take(_: Part) -> None:
        try:
            for item in waiting:
                work(item)
        except BaseException:
            deque(waiting, 0)
            raise

    in_threads(take, [(0, 0)] * max(1, min(torch.get_num_threads(), len(items))))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="kvlite-products")
