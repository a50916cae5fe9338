"""What a decoder layer computes between its products, for one token a sequence: norms, rotary
positions, gates.

The same bits as transformers' own modules on a CPU. `triton_layer_ops` has the same in one kernel
each, for CUDA.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm(NamedTuple):
    """An RMS norm.

    Attributes:
        weight: `(dim,)`.
        eps: added to the mean square.
        from_one: whether 1 is added to the weight, and the product formed in float32 (Gemma).
    """

    weight: Tensor
    eps: float
    from_one: bool = False


def normed(x: Tensor, norm: Norm) -> Tensor:
    """`x` `(..., dim)`, normed."""
    if norm.from_one:
        wide = F.rms_norm(x.float(), norm.weight.shape, None, norm.eps)
        return (wide * (1.0 + norm.weight.float())).to(x.dtype)
    return norm.weight * F.rms_norm(x, norm.weight.shape, None, norm.eps)


def added(x: Tensor, more: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """`x + more`, and that normed; `more` may be overwritten."""
    x = more.add_(x)
    return x, normed(x, norm)


def turned(
    q: Tensor, k: Tensor, norms: tuple[Norm, Norm] | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys normed, if there are `norms`, and rotated, a head's first half against its
    second.

    Args:
        q, k: `(batch, heads, dim)`, `(batch, kv heads, dim)`.
        cos, sin: `(batch or 1, 1, turned)`, of the first `turned` <= dim channels.
    """
    if norms is not None:
        q, k = normed(q, norms[0]), normed(k, norms[1])
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    moving, still = (x, None) if width == x.shape[-1] else x.split([width, x.shape[-1] - width], -1)
    first, second = moving.chunk(2, -1)
    moving = (moving * cos).add_(torch.cat([-second, first], -1).mul_(sin))
    return moving if still is None else torch.cat([moving, still], -1)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up`; `activation` is a key of `ACTIVATIONS`."""
    return ACTIVATIONS[activation](gate).mul_(up)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"SiLUActivation": F.silu, "GELUTanh": _gelu}
