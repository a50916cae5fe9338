"""One token's attention over what a head group holds, quantized or not, compiled by numba."""

from typing import Any

import numpy as np

from kvlite.ops.numba_codes import multiply_packed, weigh_packed
from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_vectors import close_exp, highest, multiply, weigh

Array = np.ndarray
Packed = tuple[Any, ...]
Sizes = tuple[int, int, int, int]


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
def products_of_held(queries, own, packed, sizes, used):
    """Products `(heads, rows, used)` of queries `(heads, rows, dim)` with all that is held; the
    rest as in `attend`."""
    (keys, _), (start, bits, _, middle) = own, sizes
    heads, rows, _ = queries.shape
    slots, places = np.arange(used - middle), np.arange(middle)
    products = np.empty((heads, rows, used), np.float32)
    for head in range(heads):
        asked, out = queries[head], products[head]
        if middle:
            multiply(asked, keys[head], slots[:start], out, 0)
            multiply_packed(asked, packed, head, places, bits, out, start)
            multiply(asked, keys[head], slots[start:], out, start + middle)
        else:
            multiply(asked, keys[head], slots, out, 0)
    return products


@jitted
def weighed(products, own, packed, sizes, softcap, sinks, out):
    """Attention by the products, which become probabilities."""
    (_, values), (start, _, bits, middle) = own, sizes
    heads, rows, used = products.shape
    for head in range(heads):
        weights, made, near = products[head], out[head], values[head]
        for row in range(rows):
            softmax(weights[row], softcap, sinks[head, row])
        made[:] = 0
        if middle:
            weigh_packed(weights, start, packed, head, middle, bits, made)
            weigh(weights, 0, near, start, made)
            weigh(weights, start + middle, near[start:], used - middle - start, made)
        else:
            weigh(weights, 0, near, used, made)


@jitted
def _attend(queries, own, packed, sizes, used, softcap, sinks, out):
    products = products_of_held(queries, own, packed, sizes, used)
    weighed(products, own, packed, sizes, softcap, sinks, out)
    return products


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
        sizes: how many exact entries come before the packed; the bits of keys and values; how many
            are packed.
        softcap, sinks: as in `kvlite.ops.softmax`; sinks `(heads, rows)` float32.

    Returns:
        output `(heads, rows, dim)` and probabilities `(heads, rows, entries)`.
    """
    out = np.empty_like(queries)
    if sinks is None:
        sinks = np.full(queries.shape[:2], -np.inf, np.float32)
    used = held + sizes[3]
    weights: Array = _attend(queries, own, packed, sizes, used, softcap or 0.0, sinks, out)
    return out, weights
