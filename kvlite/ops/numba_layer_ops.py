"""What a decoder layer of packed weights computes before and after attention, on a CPU, compiled by
numba: two calls, as each of torch's functions costs as much as all of `layer_ops` does, on one
token.

Numbers are those of `layer_ops` to rounding.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import carray

from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_linear import multiply, multiplying
from kvlite.ops.numba_llvm import floats_at
from kvlite.ops.numba_threads import board
from kvlite.ops.numba_vectors import close_exp

if TYPE_CHECKING:
    from kvlite.ops.layer_ops import Norm

Array = np.ndarray
# A norm as compiled loops take it: where its weight is, of which size, 0 for no norm; its epsilon,
# and what is added to the weight.
NORM = np.dtype(
    [("weight", np.int64), ("size", np.int64), ("eps", np.float64), ("more", np.float64)]
)
# A layer's norms, of what comes in, of queries, of keys, and of what goes into the MLP; and its
# products, to all heads, to what attention adds, to the MLP's two halves, and to what that adds.
INPUT, QUERIES, KEYS, MLP = range(4)
HEADS, OUT, GATE_UP, DOWN = range(4)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """A layer's weights as compiled loops take them. Who has it holds their tensors.

    Attributes:
        norms: `(4,)` of `NORM`.
        products: `(4, TOGETHER)` of `numba_linear.PRODUCT`; the MLP's activation is SiLU.
        heads: of queries, and KV heads.
    """

    norms: Array
    products: Array
    heads: tuple[int, int]

    def to_heads(self, x: Array, cos: Array, sin: Array) -> Array:
        """Queries, keys and values of hidden states `x` `(n, hidden size)`.

        Args:
            cos, sin: `(n or 1, 1, turned)`, see `layer_ops.turned`.

        Returns:
            `(n, all heads, dim)`, queries and keys rotated.
        """
        given = self.norms, self.products, self.heads
        made: Array = to_heads(*given, x, cos, sin, multiplying(), board())
        return made.reshape(len(x), self.heads[0] + 2 * self.heads[1], -1)

    def to_hidden(self, x: Array, attended: Array) -> Array:
        """The hidden states after a layer.

        Args:
            x: hidden states before it, `(n, hidden size)`.
            attended: what attention gave, `(n, all channels)`.
        """
        made: Array = to_hidden(self.norms, self.products, x, attended, multiplying(), board())
        return made


def array_norms(*norms: "Norm | None") -> Array:
    """Norms as compiled loops take them."""
    return np.array(
        [
            (0, 0, 0, 0)
            if norm is None
            else (norm.weight.data_ptr(), len(norm.weight), norm.eps, norm.from_one)
            for norm in norms
        ],
        NORM,
    )


@jitted
def _norm(x, norm, out):
    weight, total = carray(floats_at(norm.weight), norm.size), np.float32(0)
    for d in range(x.size):
        total += x[d] * x[d]
    size = np.float32(1 / np.sqrt(total / np.float32(x.size) + norm.eps))
    for d in range(x.size):
        out[d] = x[d] * size * (weight[d] + np.float32(norm.more))


@jitted
def to_heads(norms, products, heads, x, cos, sin, multiplying, board):
    """As of `LayerWeights`, `(n, all channels)`, by all threads of a board."""
    seen = np.empty_like(x)
    for row in range(len(x)):
        _norm(x[row], norms[INPUT], seen[row])
    out = multiply(seen, products[HEADS], multiplying, board)
    dim = out.shape[1] // (heads[0] + 2 * heads[1])
    for row in range(len(x)):
        table = row if len(cos) > 1 else 0
        for head in range(heads[0] + heads[1]):
            vector = out[row, head * dim : (head + 1) * dim]
            own = norms[QUERIES if head < heads[0] else KEYS]
            if own.size:
                _norm(vector, own, vector)
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
def to_hidden(norms, products, x, attended, multiplying, board):
    """As of `LayerWeights`, by all threads of a board."""
    total, seen = multiply(attended, products[OUT], multiplying, board), np.empty_like(x)
    for row in range(len(x)):
        for d in range(x.shape[1]):
            total[row, d] += x[row, d]
        _norm(total[row], norms[MLP], seen[row])
    both = multiply(seen, products[GATE_UP], multiplying, board)
    width = both.shape[1] // 2
    inner = np.empty((len(x), width), np.float32)
    for row in range(len(x)):
        _gate(both[row, :width], both[row, width:], inner[row])
    made = multiply(inner, products[DOWN], multiplying, board)
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
