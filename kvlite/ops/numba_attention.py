"""One token's attention over a head group whose older entries are quantized, compiled by numba."""

from typing import Any

import numpy as np

from kvlite.ops.numba_quant import ROWS, product_loop, sum_loop
from kvlite.ops.numba_vectors import close_exp, dot_rows, from_half, hadamard, highest, jitted

Array = np.ndarray
Packed = tuple[Any, ...]
Sizes = tuple[int, int, int]


@jitted
def _numbers(halves):
    """Float16 numbers `(heads, groups, n)`, given by their bits, in float32."""
    out = np.empty(halves.shape, np.float32)
    given, made = halves.reshape(halves.size), out.reshape(out.size)
    for i in range(made.size):
        made[i] = from_half(given[i])
    return out


@jitted
def _turned(queries):
    """Queries `(heads, rows, dim)` rotated, with rows of zeros behind them."""
    heads, rows, dim = queries.shape
    turned = np.zeros((heads, -(-rows // ROWS) * ROWS, dim), np.float32)
    for head in range(heads):
        for row in range(rows):
            turned[head, row] = queries[head, row]
            hadamard(turned[head, row])
    return turned


@jitted
def softmax(line, softcap, sink):
    """Logits to probabilities, in place; bent within +-softcap before, if that is not 0. A sink
    takes its share; -inf is none."""
    if softcap:
        for i in range(line.size):
            line[i] = np.tanh(line[i] / softcap) * softcap
    top, whole = max(highest(line), sink), np.float32(0)
    for i in range(line.size):
        line[i] = close_exp(line[i] - top)
        whole += line[i]
    if sink > -np.inf:
        whole += close_exp(sink - top)
    share = np.float32(1) / whole
    for i in range(line.size):
        line[i] *= share


@jitted
def _logits(queries, keys, mean, head, far, start, logits):
    """A head's logits `(rows, used)`, where `far` has those of the packed entries."""
    rows, used = logits.shape
    middle = far.shape[1]
    shifts = np.empty((rows, 1), np.float32)
    dot_rows(queries, mean, head, shifts, 0)
    near = np.empty((rows, used - middle), np.float32)
    for slot in range(used - middle):
        dot_rows(queries, keys, slot, near, slot)
    for row in range(rows):
        for i in range(start):
            logits[row, i] = near[row, i]
        for i in range(middle):
            logits[row, start + i] = far[row, i] + shifts[row, 0]
        for i in range(start, used - middle):
            logits[row, middle + i] = near[row, i]


@jitted
def _add_exact(logits, values, start, middle, out):
    """Add the exact values of a head by their weights."""
    rows, used = logits.shape
    for slot in range(used - middle):
        at = slot if slot < start else slot + middle
        for row in range(rows):
            weight = logits[row, at]
            for d in range(out.shape[1]):
                out[row, d] += weight * values[slot, d]


@jitted
def _prepared(queries, packed):
    """Queries rotated, with rows of zeros behind them; and scales and zeros in float32."""
    _, scales, zeros, _, value_scales, value_zeros, _, _ = packed
    sides = _numbers(scales), _numbers(zeros), _numbers(value_scales), _numbers(value_zeros)
    return _turned(queries), sides


@jitted
def _weights(queries, keys, packed, far, start, softcap, sinks, weights):
    """Probabilities of all entries, where `far` has the products with the packed ones; and those
    of the packed ones by themselves."""
    mean = packed[7]
    heads, rows, _ = queries.shape
    middle = far.shape[2]
    older = np.empty((heads, rows, middle), np.float32)
    for head in range(heads):
        _logits(queries[head], keys[head], mean, head, far[head], start, weights[head])
        for row in range(rows):
            softmax(weights[head, row], softcap, sinks[head, row])
            older[head, row] = weights[head, row, start : start + middle]
    return older


@jitted
def _finish(out, values, start, middle, weights):
    """Rotate the sums of packed values back, and add the exact ones."""
    for head in range(out.shape[0]):
        for row in range(out.shape[1]):
            hadamard(out[head, row])
        _add_exact(weights[head], values[head], start, middle, out[head])


def attend(
    queries: Array,
    own: tuple[Array, Array],
    held: int,
    packed: Packed,
    sizes: Sizes,
    softcap: float | None,
    sinks: Array | None,
) -> tuple[Array, Array]:
    """One token's attention.

    Args:
        queries: `(heads, rows, dim)` float32, scaled.
        own: exact keys and values, `(heads, slots, dim)` float32.
        held: how many of these slots are filled.
        packed: `kvlite.cache.packed.Packed.arrays`.
        sizes: how many exact entries come before the packed, and the bits of keys and values.
        softcap, sinks: as in `kvlite.ops.softmax`; sinks `(heads, rows)` float32.

    Returns:
        output `(heads, rows, dim)` and probabilities `(heads, rows, entries)`.
    """
    (start, bits, value_bits), (heads, rows, dim), (keys, values) = sizes, queries.shape, own
    codes, value_codes = packed[0], packed[3]
    turned, (scales, zeros, value_scales, value_zeros) = _prepared(queries, packed)
    middle = codes.shape[1]
    far = np.empty((heads, turned.shape[1], middle), np.float32)
    product_loop(bits, dim, scales.shape[1])(turned, codes, scales, zeros, 0, middle, far)
    weights = np.empty((heads, rows, held + middle), np.float32)
    if sinks is None:
        sinks = np.full((heads, rows), -np.inf, np.float32)
    older = _weights(queries, keys, packed, far, start, softcap or 0.0, sinks, weights)
    out = np.empty((heads, rows, dim), np.float32)
    sums = sum_loop(value_bits, dim, value_scales.shape[1])
    sums(older, value_codes, value_scales, value_zeros, 0, middle, out)
    _finish(out, values, start, middle, weights)
    return out, weights
