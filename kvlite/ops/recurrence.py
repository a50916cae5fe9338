"""What recurrent layers make of a few tokens, so that the state after each of them is known.

Both kinds add outer products to a state that decays: gated delta nets (Yang, Kautz and
Hatamizadeh, "Gated Delta Networks", 2024, section 3.2) and Mamba-2 (Dao and Gu, "Transformers are
SSMs", 2024, section 6). Over a few tokens the sums are small matrices; states between them never
have to be made.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class StateBefore:
    """Stands for a state where transformers carries one, if it is to be known after each token.

    Attributes:
        state: `(batch, heads, rows, columns)`.
    """

    state: Tensor


@dataclass(frozen=True)
class Recurrence:
    """A state, and what each of some tokens adds to it.

    Attributes:
        before: the state, `(batch, heads, rows, columns)`.
        decay: logarithms of what each token and those before it leave of it, `(batch, heads, L)`.
        rows, columns: what each adds is their outer product, `(batch, heads, L, ...)`.
    """

    before: Tensor
    decay: Tensor
    rows: Tensor
    columns: Tensor

    def after(self, count: int) -> Tensor:
        """The state after the first `count` tokens, at least one."""
        decay, columns = self.decay[..., :count], self.columns[:, :, :count]
        left = self.rows[:, :, :count] * (decay[..., -1:] - decay).exp()[..., None]
        state = self.before * decay[..., -1].exp()[..., None, None] + left.mT @ columns
        return state.to(self.before.dtype)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: StateBefore,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Recurrence]:
    """A few tokens through a gated delta net, in place of transformers' function for many.

    Args:
        query, key: `(batch, L, key heads, key dim)`.
        value: `(batch, L, heads, value dim)`.
        g, beta: `(batch, L, heads)`, the logarithm of the decay and how much is overwritten.

    Returns:
        What is read, shaped like `value`, and the state after each token.
    """
    before, heads = initial_state.state.float(), value.shape[2]
    query, key = (_of_heads(each, heads) for each in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (each * (each * each).sum(-1, True).add(1e-6).rsqrt() for each in (query, key))
    query = query * query.shape[-1] ** -0.5
    decay, overwrites = g.float().mT.cumsum(-1), beta.float().mT[..., None]
    left = decay.exp()[..., None]
    between = _between(decay)
    system = overwrites * (key @ key.mT) * between
    missing = overwrites * (value.float().transpose(1, 2) - left * (key @ before))
    added = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
    out = left * (query @ before) + (query @ key.mT * between) @ added
    return out.transpose(1, 2).to(value.dtype), Recurrence(before, decay, key, added)


def state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_states: StateBefore,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[Tensor, Recurrence]:
    """A few tokens through a Mamba-2 layer, in place of transformers' function for many.

    Args:
        hidden_states: `(batch, L, heads, dim)`.
        dt: `(batch, L, heads)`, before its bias and softplus.
        A, D, dt_bias: `(heads,)`.
        B, C: `(batch, L, groups, state size)`.

    Returns:
        What is read, float32, shaped like `hidden_states`, and the state after each token.
    """
    before, x = initial_states.state, hidden_states.float()
    steps = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit).float()
    decay = (A.float() * steps).mT.cumsum(-1)
    added = (x * steps[..., None]).transpose(1, 2)
    B, C = (_of_heads(each, x.shape[2]) for each in (B, C))
    out = decay.exp()[..., None] * (C @ before.float().mT) + (C @ B.mT * _between(decay)) @ added
    return out.transpose(1, 2) + D[:, None] * x, Recurrence(before, decay, added, B)


def _of_heads(each: Tensor, heads: int) -> Tensor:
    """`(batch, L, groups, dim)` as `(batch, heads, L, dim)` float32."""
    return each.float().repeat_interleave(heads // each.shape[2], 2).transpose(1, 2)


def _between(decay: Tensor) -> Tensor:
    """What is left at each token (second to last) of what each one before it added."""
    length = decay.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu(1)
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
