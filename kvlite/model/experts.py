"""Experts whose weights are packed: a matrix is unpacked while tokens go through its expert.

transformers holds all experts of a layer in one tensor a projection. Here a module is in its place
that gives one expert's matrix at a time, and a function that is registered with transformers takes
one expert after the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONE_BY_ONE = "kvlite"
# Experts without a gate have the second.
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


class PackedExperts(nn.Module, ABC):
    """One projection of all experts of a layer.

    Attributes:
        stacks: names of its parameters that have each expert's part, one after the other.
    """

    stacks: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __getitem__(self, expert: int) -> Tensor:
        """One expert's matrix, unpacked, as transformers would have it."""


def pack_experts(module: nn.Module, packed: Callable[[Tensor], PackedExperts]) -> None:
    """Replace, in place, the tensors of all experts within `module` by what `packed` makes of them,
    `(experts, ...)`, and let one expert after the other be computed."""
    for experts in experts_of(module):
        take_one_by_one(experts)
        for name in filter(partial(hasattr, experts), PROJECTIONS):
            whole = getattr(experts, name).data
            delattr(experts, name)
            setattr(experts, name, packed(whole))


def experts_of(module: nn.Module) -> Iterator[Any]:
    """transformers' modules of experts within a module."""
    for part in module.modules():
        if hasattr(part, "num_experts") and hasattr(part, PROJECTIONS[-1]):
            yield part


def stacked(experts: Any) -> Iterator[nn.Parameter]:
    """The large parameters of transformers' module of experts, of which each has its part."""
    for name in filter(partial(hasattr, experts), PROJECTIONS):
        held = getattr(experts, name)
        own = [name] if isinstance(held, nn.Parameter) else [f"{name}.{own}" for own in held.stacks]
        yield from map(experts.get_parameter, own)


def take_one_by_one(experts: Any) -> None:
    """Let one expert after the other be computed, of those that tokens go through."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(ONE_BY_ONE, _one_by_one)
    experts.config._experts_implementation = ONE_BY_ONE


def _one_by_one(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """What experts make of tokens `(n, hidden size)`; `chosen` are each token's, `(n, top k)`, and
    `shares` their weights. A module may have an own `arriving`, which says where each lies."""
    out = torch.zeros_like(hidden)
    for expert, at in getattr(experts, "arriving", _in_place)(chosen):
        _add(out, experts, expert, at, hidden, chosen, shares)
    return out


def _add(
    out: Tensor, experts: Any, expert: int, at: int, hidden: Tensor, chosen: Tensor, shares: Tensor
) -> None:
    """Add the part of one expert, whose weights lie `at`, to `out`; of the one before nothing is
    there any more."""
    here = chosen == expert
    rows = here.any(-1).nonzero()[:, 0]
    own = shares.masked_fill(~here, 0).sum(-1)[rows, None]
    if experts.has_gate:
        made = experts._apply_gate(_product(experts, "gate_up_proj", expert, at, hidden[rows]))
    else:
        made = experts.act_fn(_product(experts, "up_proj", expert, at, hidden[rows]))
    made = _product(experts, "down_proj", expert, at, made) * own
    out.index_add_(0, rows, made.to(out.dtype))


def _in_place(chosen: Tensor) -> Iterator[tuple[int, int]]:
    # For a plan one expert that is given all tokens takes as much as any.
    used = [0] if chosen.is_meta else chosen.unique().tolist()
    return zip(used, used, strict=True)


def _product(experts: Any, name: str, expert: int, at: int, rows: Tensor) -> Tensor:
    weight = getattr(experts, name)[at]
    out = rows @ weight if experts.is_transposed else F.linear(rows, weight)
    return out + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else out
