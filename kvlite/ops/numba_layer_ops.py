"""`layer_ops` on a CPU for float32, compiled by numba: each of torch's functions costs as much as
all of this does, on one token.

Numbers are those of `layer_ops` to rounding.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlite.ops import layer_ops
from kvlite.ops.layer_ops import Norm
from kvlite.ops.numba_vectors import close_exp, jitted


def normed(x: Tensor, norm: Norm) -> Tensor:
    """As `layer_ops.normed`."""
    out = torch.empty_like(x)
    _norm(_rows(x), norm.weight.numpy(), norm.eps, norm.from_one, _rows(out))
    return out


def added(x: Tensor, more: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """As `layer_ops.added`."""
    out = torch.empty_like(x)
    weight = norm.weight.numpy()
    _add_and_norm(_rows(x), _rows(more), weight, norm.eps, norm.from_one, _rows(out))
    return more, out


def turned(
    q: Tensor, k: Tensor, norms: tuple[Norm, Norm] | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """As `layer_ops.turned`."""
    if norms is not None:
        q, k = normed(q.contiguous(), norms[0]), normed(k.contiguous(), norms[1])
    _turn(q.numpy(), k.numpy(), cos.numpy()[:, 0], sin.numpy()[:, 0])
    return q, k


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As `layer_ops.gated`."""
    if activation != "SiLUActivation":
        return layer_ops.gated(gate, up, activation)
    _gate(_rows(gate), _rows(up))
    return up


def _rows(x: Tensor) -> Any:
    """`(rows, dim)`."""
    return x.view(-1, x.shape[-1]).numpy()


@jitted
def _norm(x, weight, eps, from_one, out):
    one = np.float32(1) if from_one else np.float32(0)
    for row in range(x.shape[0]):
        total = np.float32(0)
        for d in range(x.shape[1]):
            total += x[row, d] * x[row, d]
        size = np.float32(1 / np.sqrt(total / np.float32(x.shape[1]) + eps))
        for d in range(x.shape[1]):
            out[row, d] = x[row, d] * size * (weight[d] + one)


@jitted
def _add_and_norm(x, more, weight, eps, from_one, out):
    for row in range(x.shape[0]):
        for d in range(x.shape[1]):
            more[row, d] += x[row, d]
    _norm(more, weight, eps, from_one, out)


@jitted
def _turn(q, k, cos, sin):
    """Rotate in place."""
    for batch in range(q.shape[0]):
        table = batch if cos.shape[0] > 1 else 0
        _turn_heads(q[batch], cos[table], sin[table])
        _turn_heads(k[batch], cos[table], sin[table])


@jitted
def _turn_heads(x, cos, sin):
    half = cos.size // 2
    for head in range(x.shape[0]):
        for d in range(half):
            one, other = x[head, d], x[head, half + d]
            x[head, d] = one * cos[d] - other * sin[d]
            x[head, half + d] = other * cos[half + d] + one * sin[half + d]


@jitted
def _gate(gate, up):
    for row in range(gate.shape[0]):
        for d in range(gate.shape[1]):
            x = gate[row, d]
            power = close_exp(-abs(x))
            share = np.float32(1) / (np.float32(1) + power)
            up[row, d] *= x * (share if x >= 0 else power * share)
