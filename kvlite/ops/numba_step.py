"""Tokens of one or several conversations on their way through decoder layers of packed weights, on
a CPU, in one compiled call: from Python, a small model's layers would take twice as long."""

from functools import lru_cache

import numpy as np

from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_layer_ops import LayerWeights, to_heads, to_hidden
from kvlite.ops.numba_linear import multiplying
from kvlite.ops.numba_rows import Given, attending, no_sinks, share_heads
from kvlite.ops.numba_threads import board

Array = np.ndarray


def through(
    layers: list[LayerWeights],
    x: Array,
    cos: Array,
    sin: Array,
    scale: float,
    lines: list[list[list[int]]],
    recalling: tuple[int, int, int, int],
    row: int,
    slots: int,
) -> tuple[Array, Array, Array]:
    """The hidden states after some layers, `(tokens, hidden size)`, and how many entries came,
    `(layers, tokens)`. Nothing is counted, so that it can be done again.

    Args:
        x: hidden states before them, `(tokens, hidden size)` float32.
        cos, sin: `(tokens, 1, turned)`, see `layer_ops.turned`.
        scale: of queries.
        lines: of each layer, and the rest, as `numba_rows.attend` takes it.
        row: how many tokens in a row are of one conversation.
        slots: of so many the positions after each token are returned, `(layers, tokens, KV heads,
            slots)` int32; 0 for none.
    """
    table, heads = np.array(lines, np.int64), layers[0].heads
    num_fetched = np.zeros((*table.shape[:2], heads[1]), np.int64)
    tokens = len(x) if slots else 0
    held = np.empty((len(layers), tokens, heads[1], slots), np.int32)
    functions, sinks = (multiplying(), attending(table)), no_sinks(heads[1], heads[0] // heads[1])
    given = x, cos, sin, np.float32(scale), table, sinks, recalling, num_fetched, held, row
    out: Array = through_all(*_joined(tuple(layers)), heads, *given, *functions, board())
    return out, num_fetched.sum(2), held


@lru_cache(maxsize=256)
def _joined(layers: tuple[LayerWeights, ...]) -> tuple[Array, Array]:
    return np.stack([each.norms for each in layers]), np.stack([each.products for each in layers])


@jitted
def through_all(
    norms, products, heads, x, cos, sin, scale, table, sinks, recalling, num_fetched, held, row,
    multiplying, one, board,
):  # fmt: skip
    """As `through`, in compiled code."""
    (every, own), count, no_weights = heads, len(x), np.empty((0, 0, 0, 0), np.float32)
    for layer in range(len(table)):
        weights = norms[layer], products[layer]
        made = to_heads(*weights, heads, x, cos, sin, multiplying, board)
        dim = made.shape[1] // (every + 2 * own)
        parts = made.reshape(count, every + 2 * own, dim)
        q = (parts[:, :every] * scale).reshape(count, own, every // own, dim)
        k, v = parts[:, every : every + own].copy(), parts[:, every + own :].copy()
        out = np.empty_like(q)
        of_layer = table[layer], 0.0, sinks, recalling, out, num_fetched[layer], held[layer], row
        share_heads(board, one, Given(q, k, v, *of_layer, no_weights))
        x = to_hidden(*weights, x, out.reshape(count, every * dim), multiplying, board)
    return x
