"""Experts whose weights are packed: a matrix is unpacked while tokens go through its expert.

transformers holds all experts of a layer in one tensor a projection. Here a module is in its place
that gives one expert's matrix at a time, and a function that is registered with transformers takes
one expert after the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONE_BY_ONE = "kvlite"
# Experts without a gate have the second.
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


class PackedExperts(nn.Module, ABC):
    """One projection of all experts of a layer."""

    @abstractmethod
    def __getitem__(self, expert: int) -> Tensor:
        """One expert's matrix, unpacked, as transformers would have it."""


def pack_experts(module: nn.Module, packed: Callable[[Tensor], PackedExperts]) -> None:
    """Replace, in place, the tensors of all experts within `module` by what `packed` makes of them,
    `(experts, ...)`, and let one expert after the other be computed."""
    register_experts()
    for experts in experts_of(module):
        experts.config._experts_implementation = ONE_BY_ONE
        for name in filter(partial(hasattr, experts), PROJECTIONS):
            whole = getattr(experts, name).data
            delattr(experts, name)
            setattr(experts, name, packed(whole))


def experts_of(module: nn.Module) -> Iterator[Any]:
    """transformers' modules of experts within a module."""
    for part in module.modules():
        if hasattr(part, "num_experts") and hasattr(part, PROJECTIONS[-1]):
            yield part


def register_experts() -> None:
    """Make `ONE_BY_ONE` known to transformers; harmless to repeat."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(ONE_BY_ONE, _one_by_one)


def _one_by_one(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """What experts make of tokens `(n, hidden size)`; `chosen` are each token's, `(n, top k)`, and
    `shares` their weights."""
    out = torch.zeros_like(hidden)
    for expert in _used(chosen):
        _add(out, experts, expert, hidden, chosen, shares)
    return out


def _add(
    out: Tensor, experts: Any, expert: int, hidden: Tensor, chosen: Tensor, shares: Tensor
) -> None:
    """Add one expert's part to `out`; of the one before nothing is there any more."""
    here = chosen == expert
    rows = here.any(-1).nonzero()[:, 0]
    own = shares.masked_fill(~here, 0).sum(-1)[rows, None]
    if experts.has_gate:
        made = experts._apply_gate(_product(experts, "gate_up_proj", expert, hidden[rows]))
    else:
        made = experts.act_fn(_product(experts, "up_proj", expert, hidden[rows]))
    made = _product(experts, "down_proj", expert, made) * own
    out.index_add_(0, rows, made.to(out.dtype))


def _used(chosen: Tensor) -> list[int]:
    # For a plan one expert that is given all tokens takes as much as any.
    return [0] if chosen.is_meta else chosen.unique().tolist()


def _product(experts: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    weight = getattr(experts, name)[expert]
    out = rows @ weight if experts.is_transposed else F.linear(rows, weight)
    return out + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else out
