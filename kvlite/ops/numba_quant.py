"""Products with all of many quantized vectors, compiled for the processor and shared by threads.

Without numba, `Hadamard` forms the same products from torch's functions, some four times as
slowly.
"""

from math import prod
from typing import Any

import numpy as np
from numba import types
from torch import Tensor

from kvlite.ops.numba_codes import multiply_codes, weigh_codes
from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_threads import board, reading, share, work

# Channels from which on threads share the work; those of a part at least, and parts at most: as
# many with any number of threads, so that sums are the same.
SHARED, CHANNELS, PARTS = 1 << 22, 1 << 20, 16


def dot(turned: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Products of rows with every vector, both rotated.

    Args:
        turned: `(heads, rows, dim)` float32.
        codes, scales, zeros: `(heads, n, dim * bits / 8)` uint8, and `(heads, groups, n)` float16;
            see `Hadamard`.

    Returns:
        `(heads, rows, n)` float32.
    """
    (heads, rows, dim), count = turned.shape, codes.shape[1]
    out, parts = turned.new_empty(1, heads, rows, count), _parts(count * heads * dim)
    given = *_arrays(turned, codes, scales, zeros), count, bits, parts, out.numpy()
    share(board(parts), dotting(), given, parts)
    return out[0]


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
    parts = _parts(count * heads * dim)
    outs = weights.new_empty(parts, heads, rows, dim)
    given = *_arrays(weights, codes, scales, zeros), count, bits, parts, outs.numpy()
    share(board(parts), weighing(), given, parts)
    return outs.sum(0)


def _parts(channels: int) -> int:
    return min(PARTS, channels // CHANNELS) if channels >= SHARED else 1


def _arrays(rows: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> list[Any]:
    """One layout: loops are compiled for it."""
    halves = (_whole(each, 2).numpy().view(np.uint16) for each in (scales, zeros))
    return [rows.contiguous().numpy(), _whole(codes, 1).numpy(), *halves]


def _whole(vectors: Tensor, dim: int) -> Tensor:
    """All that there is storage for behind the first vectors, which lie along `dim`; a copy of
    those, if they lie elsewhere."""
    if vectors.is_contiguous():
        return vectors
    size = [*vectors.shape]
    size[dim] = 1
    size[dim] = vectors.stride(0) // prod(size[1:])
    steps = prod(size[1:]), size[2], 1
    lie = zip(vectors.shape, vectors.stride(), steps, strict=True)
    if any(count > 1 and step != own for count, step, own in lie):
        return vectors.contiguous()
    return vectors.as_strided(size, steps)


_ROWS, _HALVES = types.float32[:, :, ::1], types.uint16[:, :, ::1]
# Rows; codes, scales and zeros; how many vectors; bits; how many parts; the output, of all or of
# each.
_given = reading(
    types.Tuple(
        (
            *(_ROWS, types.uint8[:, :, ::1], _HALVES, _HALVES),
            *(types.int64, types.int64, types.int64, types.float32[:, :, :, ::1]),
        )
    )
)


@work
def dotting(address, part):
    """Part of the work of `dot`."""
    turned, codes, scales, zeros, count, bits, parts, out = _given(address)
    first, last = _range(count, part, parts)
    places = np.arange(first, last)
    for head in range(len(codes)):
        side = codes[head], scales[head], zeros[head]
        multiply_codes(turned[head], side, places, bits, out[0, head], first)


@work
def weighing(address, part):
    """Part of the work of `weigh`."""
    weights, codes, scales, zeros, count, bits, parts, out = _given(address)
    first, last = _range(count, part, parts)
    places, own = np.arange(first, last), out[part]
    own[:] = 0
    for head in range(len(codes)):
        side = codes[head], scales[head], zeros[head]
        weigh_codes(weights[head], first, side, places, bits, own[head])


@jitted
def _range(count, part, parts):
    return count * part // parts, count * (part + 1) // parts
