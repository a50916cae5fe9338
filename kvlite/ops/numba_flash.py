"""Attention of many rows on a CPU that multiplies bfloat16 numbers: blocks of entries that stay in
the processor's cache, with a running maximum and sum ("FlashAttention-2: Faster Attention with
Better Parallelism and Work Partitioning", section 3.1)."""

import numpy as np
import torch
from numba import carray, types
from torch import Tensor

from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_llvm import floats_at
from kvlite.ops.numba_threads import board, reading, share, work
from kvlite.ops.numba_tiles import COLUMNS, ROWS, add_tile, set_tile, to_bfloat16
from kvlite.ops.numba_vectors import close_exp, highest

# Entries whose keys and values are packed at a time; they stay in the processor's cache, as do the
# rows of a query head that are shared by a call, at most and, for many threads, at least.
BLOCK = 16 * COLUMNS
MOST_ROWS, LEAST_ROWS = 86 * ROWS, 8 * ROWS


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, out: Tensor, lse: Tensor
) -> None:
    """Attention of L queries over N entries; products are of numbers rounded to bfloat16, and
    summed in float32.

    Args:
        q: `(batch, heads, L, dim)` float32.
        k, v: `(batch, kv heads, N, dim)` float32; values may have another number of channels.
        causal: whether rows are the last L entries, and each sees itself and all before it.
        out, lse: output `(batch, heads, L, dim of v)` and natural-log lse `(batch, heads, L)`,
            float32; written.
    """
    batch, length, kv_heads = len(q), q.shape[2], k.shape[1]
    place = k.shape[2] - length if causal else -1
    wanted = batch * kv_heads * length // (2 * torch.get_num_threads())
    size = max(LEAST_ROWS, min(MOST_ROWS, wanted // ROWS * ROWS))
    parts = batch * kv_heads * -(-length // size)
    keys, values = (each if each[0, 0].is_contiguous() else each.contiguous() for each in (k, v))
    arrays = [each.numpy() for each in (q, keys, values, out, lse)]
    # The first rows, which see least, come last: so threads end at about the same time.
    share(board(parts), _attend_rows(), (*arrays, scale, place, size), parts)


_ANY = types.Array(types.float32, 4, "A")
_OUT, _LSE = types.float32[:, :, :, ::1], types.float32[:, :, ::1]
_given = reading(
    types.Tuple((_ANY, _ANY, _ANY, _OUT, _LSE, types.float64, types.int64, types.int64))
)


@work
def _attend_rows(address, part):
    """Of `size` rows of a KV head; where they are causal, the first of all rows is at `place`."""
    q, k, v, out, lse, scale, place, size = _given(address)
    chunks = -(-q.shape[2] // size)
    which, first = part // chunks, part % chunks * size
    sequence, head, last = which // k.shape[1], which % k.shape[1], min(first + size, q.shape[2])
    group = q.shape[1] // k.shape[1]
    own, rows = slice(head * group, (head + 1) * group), slice(first, last)
    keys = carray(floats_at(k[sequence, head].ctypes.data), k.shape[2:])
    values = carray(floats_at(v[sequence, head].ctypes.data), v.shape[2:])
    start = -1 if place < 0 else place + first
    made, sums = out[sequence, own, rows], lse[sequence, own, rows]
    _attend(q[sequence, own, rows], keys, values, scale, start, made, sums)


@jitted
def _attend(q, k, v, scale, first, out, lse):
    # q `(heads, rows, dim)`, k and v `(n, dim)`; out and lse are written. Each row sees the entries
    # up to itself, the first row those up to `first`; all if that is -1.
    heads, length, _ = q.shape
    entries = len(k) if first < 0 else min(len(k), first + length)
    queries, pairs = _packed_rows(q, scale)
    wide = -(-v.shape[1] // COLUMNS)
    sums = np.zeros((len(queries), wide * COLUMNS), np.float32)
    top = np.full(len(queries), -np.inf, np.float32)
    whole = np.zeros(len(queries), np.float32)
    keys = np.empty((BLOCK // COLUMNS, pairs, COLUMNS, 2), np.uint16)
    values = np.empty((wide, BLOCK // 2, COLUMNS, 2), np.uint16)
    logits = np.empty((ROWS, BLOCK), np.float32)
    shares = np.empty((ROWS, BLOCK), np.uint16)
    padded = len(queries) // heads
    for start in range(0, entries, BLOCK):
        stop = min(start + BLOCK, entries)
        _pack_columns(k[start:stop].T, keys)
        _pack_columns(v[start:stop], values)
        for row in range(0, len(queries), ROWS):
            last = row % padded + ROWS - 1
            seen = stop - start if first < 0 else min(stop, first + last + 1) - start
            if seen <= 0:
                continue
            tiles = -(-seen // COLUMNS)
            for tile in range(tiles):
                set_tile(
                    queries.ctypes.data + row * queries.strides[0],
                    queries.strides[0],
                    keys.ctypes.data + tile * keys.strides[0],
                    pairs,
                    logits.ctypes.data + tile * COLUMNS * 4,
                    logits.strides[0],
                )
            for i in range(ROWS):
                own = seen if first < 0 else min(seen, first + row % padded + i + 1 - start)
                _online_softmax(
                    logits[i], shares[i], own, tiles * COLUMNS, sums[row + i], top, whole, row + i
                )
            for side in range(wide):
                add_tile(
                    shares.ctypes.data,
                    shares.strides[0],
                    values.ctypes.data + side * values.strides[0],
                    tiles * COLUMNS // 2,
                    sums.ctypes.data + row * sums.strides[0] + side * COLUMNS * 4,
                    sums.strides[0],
                )
    for head in range(heads):
        for row in range(length):
            at = head * padded + row
            share = np.float32(1) / whole[at]
            for d in range(v.shape[1]):
                out[head, row, d] = sums[at, d] * share
            lse[head, row] = top[at] + np.log(whole[at])


@jitted
def _packed_rows(q, scale):
    heads, length, dim = q.shape
    pairs, padded = -(-dim // 2), -(-length // ROWS) * ROWS
    packed = np.zeros((heads * padded, 2 * pairs), np.uint16)
    for head in range(heads):
        for row in range(length):
            for d in range(dim):
                packed[head * padded + row, d] = to_bfloat16(q[head, row, d] * np.float32(scale))
    return packed, pairs


@jitted
def _pack_columns(numbers, packed):
    """Round numbers `(summed, columns)` float32 to tiles of columns `(tiles, pairs, COLUMNS, 2)`
    uint16, as many as there are columns for; what is left over of these is 0."""
    summed, columns = numbers.shape
    for tile in range(-(-columns // COLUMNS)):
        first = tile * COLUMNS
        some = min(COLUMNS, columns - first)
        for i in range(2 * packed.shape[1]):
            line = packed[tile, i // 2, :, i % 2]
            held = some if i < summed else 0
            for column in range(held):
                line[column] = to_bfloat16(numbers[i, first + column])
            for column in range(held, COLUMNS):
                line[column] = 0


@jitted
def _online_softmax(logits, shares, seen, width, sums, top, whole, row):
    # What was summed before goes down with a higher maximum.
    if seen <= 0:
        shares[:width] = 0
        return
    most = max(top[row], highest(logits[:seen]))
    total = np.float32(0)
    for i in range(seen):
        share = close_exp(logits[i] - most)
        total += share
        shares[i] = to_bfloat16(share)
    for i in range(seen, width):
        shares[i] = 0
    if most != top[row]:
        less = np.float32(np.exp(top[row] - most))
        for d in range(sums.size):
            sums[d] *= less
        whole[row] *= less
        top[row] = most
    whole[row] += total
