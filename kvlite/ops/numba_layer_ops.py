"""`layer_ops` on a CPU for float32 arrays, compiled by numba: each of torch's functions costs as
much as all of this does, on one token.

Numbers are those of `layer_ops` to rounding.
"""

from typing import NamedTuple

import numpy as np

from kvlite.ops.layer_ops import Norm
from kvlite.ops.numba_vectors import close_exp, jitted

Array = np.ndarray


class ArrayNorm(NamedTuple):
    """`layer_ops.Norm` with an array `(dim,)` float32 and what is added to it."""

    weight: Array
    eps: float
    more: float

    @classmethod
    def of(cls, norm: Norm) -> "ArrayNorm":
        """The same norm."""
        return cls(norm.weight.detach().numpy(), norm.eps, float(norm.from_one))


NO_NORM = ArrayNorm(np.empty(0, np.float32), 0.0, 0.0)


def normed(x: Array, norm: ArrayNorm) -> Array:
    """Rows `(n, dim)`, normed."""
    out = np.empty_like(x)
    _norm(x, *norm, out)
    return out


def added(x: Array, more: Array, norm: ArrayNorm) -> Array:
    """The sum of rows `(n, dim)`, normed; `more` becomes the sum."""
    out = np.empty_like(x)
    _add_and_norm(x, more, *norm, out)
    return out


def turn(q: Array, k: Array, norms: tuple[ArrayNorm, ArrayNorm], cos: Array, sin: Array) -> None:
    """Queries `(batch, heads, dim)` and keys normed, unless by `NO_NORM`, and rotated, in place.

    Args:
        cos, sin: `(batch or 1, 1, turned)`, see `layer_ops.turned`.
    """
    _turn(q, k, *norms[0], *norms[1], cos, sin)


def gate(x: Array, up: Array) -> None:
    """`silu(x) * up` of rows `(n, width)`, in the place of `up`."""
    _gate(x, up)


@jitted
def _norm(x, weight, eps, more, out):
    for row in range(x.shape[0]):
        total = np.float32(0)
        for d in range(x.shape[1]):
            total += x[row, d] * x[row, d]
        size = np.float32(1 / np.sqrt(total / np.float32(x.shape[1]) + eps))
        for d in range(x.shape[1]):
            out[row, d] = x[row, d] * size * (weight[d] + np.float32(more))


@jitted
def _add_and_norm(x, more, weight, eps, from_one, out):
    for row in range(x.shape[0]):
        for d in range(x.shape[1]):
            more[row, d] += x[row, d]
    _norm(more, weight, eps, from_one, out)


@jitted
def _turn(q, k, q_weight, q_eps, q_more, k_weight, k_eps, k_more, cos, sin):
    for batch in range(q.shape[0]):
        table = batch if cos.shape[0] > 1 else 0
        if q_weight.size:
            _norm(q[batch], q_weight, q_eps, q_more, q[batch])
            _norm(k[batch], k_weight, k_eps, k_more, k[batch])
        _turn_heads(q[batch], cos[table, 0], sin[table, 0])
        _turn_heads(k[batch], cos[table, 0], sin[table, 0])


@jitted
def _turn_heads(x, cos, sin):
    half = cos.size // 2
    for head in range(x.shape[0]):
        for d in range(half):
            one, other = x[head, d], x[head, half + d]
            x[head, d] = one * cos[d] - other * sin[d]
            x[head, half + d] = other * cos[half + d] + one * sin[half + d]


@jitted
def _gate(x, up):
    for row in range(x.shape[0]):
        for d in range(x.shape[1]):
            power = close_exp(-abs(x[row, d]))
            share = np.float32(1) / (np.float32(1) + power)
            up[row, d] *= x[row, d] * (share if x[row, d] >= 0 else power * share)
