"""One token's attention over what a KV head holds, quantized or not, compiled by numba.

What is quantized is None where all is exact, so that no loop is compiled for it: that takes long.
"""

import numpy as np

from kvlite.ops.numba_codes import count_of, multiply_packed, weigh_packed
from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_vectors import close_exp, highest, multiply, weigh


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
def attend_head(queries, head, own, packed, sizes, softcap, sinks, out, weights):
    """Attention of one of some heads over the entries that it holds.

    Args:
        queries: its own, `(rows, dim)` float32, scaled.
        own: exact keys and values, `(heads, slots, dim)` float32.
        packed: `kvlite.cache.packed.Packed.arrays`, or None.
        sizes: how many exact entries come before the packed, and the bits of keys and values.
        softcap: as in `kvlite.ops.softmax`, 0 for none.
        sinks: likewise, `(heads, rows)` float32, -inf for none.
        out, weights: output `(rows, dim)` and probabilities `(rows, entries)`; written.
    """
    (keys, values), (start, bits, value_bits), middle = own, sizes, count_of(packed)
    slots = np.arange(weights.shape[1] - middle)
    multiply(queries, keys[head], slots[:start], weights, 0)
    if packed is not None and middle:
        places = np.arange(middle)
        multiply_packed(queries, packed, head, places, bits, weights, start)
    multiply(queries, keys[head], slots[start:], weights, start + middle)
    for row in range(len(weights)):
        softmax(weights[row], softcap, sinks[head, row])
    out[:] = 0
    if packed is not None and middle:
        weigh_packed(weights, start, packed, head, value_bits, out)
    weigh(weights, 0, values[head], start, out)
    weigh(weights, start + middle, values[head, start:], slots.size - start, out)
