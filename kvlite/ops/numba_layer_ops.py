"""What a decoder layer of packed weights computes before and after attention, on a CPU, compiled by
numba: two calls, as each of torch's functions costs as much as all of `layer_ops` does, on one
token.

Numbers are those of `layer_ops` to rounding.
"""

import numpy as np

from kvlite.ops.layer_ops import Norm
from kvlite.ops.numba_linear import Products, multiply
from kvlite.ops.numba_threads import board
from kvlite.ops.numba_vectors import close_exp, jitted

Array = np.ndarray
ArrayNorm = tuple[Array, float, float]
NO_NORM: ArrayNorm = np.empty(0, np.float32), 0.0, 0.0


def array_norm(norm: Norm) -> ArrayNorm:
    """A norm's weight `(dim,)` float32, its epsilon, and what is added to the weight."""
    return norm.weight.detach().numpy(), norm.eps, float(norm.from_one)


def to_heads(
    norm: ArrayNorm,
    qkv: Products,
    norms: tuple[ArrayNorm, ArrayNorm],
    heads: tuple[int, int],
    x: Array,
    cos: Array,
    sin: Array,
) -> Array:
    """Queries, keys and values of hidden states `x` `(n, hidden size)`.

    Args:
        norm: of what comes in.
        qkv: the products to queries, keys and values, or to all in one.
        norms: of queries and of keys, a head at a time; `NO_NORM` for none.
        heads: of queries, and KV heads.
        cos, sin: `(n or 1, 1, turned)`, see `layer_ops.turned`.

    Returns:
        `(n, all heads, dim)`, queries and keys rotated.
    """
    made: Array = _to_heads(norm, qkv, *norms, heads, x, cos, sin, board())
    return made.reshape(len(x), heads[0] + 2 * heads[1], -1)


def to_hidden(
    out: Products,
    norm: ArrayNorm,
    gate_up: Products,
    down: Products,
    x: Array,
    attended: Array,
) -> Array:
    """The hidden states after a layer.

    Args:
        norm: of what goes into the MLP.
        gate_up: the MLP's products, or both in one; its activation is SiLU.
        x: hidden states before the layer, `(n, hidden size)`.
        attended: what attention gave, `(n, all channels)`.
    """
    made: Array = _to_hidden(out, norm, gate_up, down, x, attended, board())
    return made


@jitted
def _norm(x, weight, eps, more, out):
    total = np.float32(0)
    for d in range(x.size):
        total += x[d] * x[d]
    size = np.float32(1 / np.sqrt(total / np.float32(x.size) + eps))
    for d in range(x.size):
        out[d] = x[d] * size * (weight[d] + np.float32(more))


@jitted
def _to_heads(norm, qkv, q_norm, k_norm, heads, x, cos, sin, board):
    seen = np.empty_like(x)
    for row in range(len(x)):
        _norm(x[row], norm[0], norm[1], norm[2], seen[row])
    out = multiply(seen, qkv, board)
    dim = out.shape[1] // (heads[0] + 2 * heads[1])
    for row in range(len(x)):
        table = row if len(cos) > 1 else 0
        for head in range(heads[0] + heads[1]):
            vector = out[row, head * dim : (head + 1) * dim]
            own = q_norm if head < heads[0] else k_norm
            if own[0].size:
                _norm(vector, own[0], own[1], own[2], vector)
            _turn(vector, cos[table, 0], sin[table, 0])
    return out


@jitted
def _turn(x, cos, sin):
    half = cos.size // 2
    for d in range(half):
        one, other = x[d], x[half + d]
        x[d] = one * cos[d] - other * sin[d]
        x[half + d] = other * cos[half + d] + one * sin[half + d]


@jitted
def _to_hidden(out, norm, gate_up, down, x, attended, board):
    total, seen = multiply(attended, out, board), np.empty_like(x)
    for row in range(len(x)):
        for d in range(x.shape[1]):
            total[row, d] += x[row, d]
        _norm(total[row], norm[0], norm[1], norm[2], seen[row])
    both = multiply(seen, gate_up, board)
    width = both.shape[1] // 2
    inner = np.empty((len(x), width), np.float32)
    for row in range(len(x)):
        _gate(both[row, :width], both[row, width:], inner[row])
    made = multiply(inner, down, board)
    for row in range(len(x)):
        for d in range(x.shape[1]):
            made[row, d] += total[row, d]
    return made


@jitted
def _gate(x, up, out):
    for d in range(x.size):
        power = close_exp(-abs(x[d]))
        share = np.float32(1) / (np.float32(1) + power)
        out[d] = up[d] * x[d] * (share if x[d] >= 0 else power * share)
