"""How tokens go through a layer's experts, by functions that are registered with transformers.

transformers holds all experts of a layer in one tensor a projection. Where weights are packed, a
module is in its place that gives one expert's matrix at a time, and one expert is taken after the
other. On CUDA, kernels read what few tokens need in its place, packed or not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlite.ops.device import has_triton

ONE_BY_ONE, TOGETHER = "kvlite", "kvlite together"
# Experts without a gate have the second.
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


class PackedExperts(nn.Module, ABC):
    """One projection of all experts of a layer.

    Attributes:
        stacks: names of its parameters that have each expert's part, one after the other.
    """

    stacks: tuple[str, ...]

    @abstractmethod
    def __getitem__(self, expert: int) -> Tensor:
        """One expert's matrix, unpacked, as transformers would have it."""

    def product(self, rows: Tensor, expert: int, transposed: bool) -> Tensor:
        """Rows by one expert's matrix, `(n, outputs)`; `transposed` are matrices
        `(inputs, outputs)`."""
        return _by(rows, self[expert], transposed)

    def in_place(self, transposed: bool) -> bool:
        """Whether it has `products`; `transposed` as for `product`."""
        return False

    def products(self, rows: Tensor, chosen: Tensor, bias: Tensor | None) -> Tensor:
        """As `ops.triton_experts.multiply`."""
        raise NotImplementedError


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
    yield from filter(is_experts, module.modules())


def is_experts(module: Any) -> bool:
    """Whether a module is transformers' of experts."""
    return hasattr(module, "num_experts") and hasattr(module, PROJECTIONS[-1])


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
    if not _is_exchangeable(experts):
        experts.is_transposed, experts.has_bias = True, False
        experts.forward = partial(_scaled_before, experts)
        return
    experts.config._experts_implementation = ONE_BY_ONE


def _is_exchangeable(experts: Any) -> bool:
    """Whether transformers lets another function compute these; Llama 4's not."""
    return hasattr(experts, "has_gate")


def take_few_in_place(module: nn.Module) -> None:
    """Let kernels read the experts of few tokens where transformers would compute all experts
    together, for which it may wait for the device."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(TOGETHER, _together)
    for experts in filter(_is_exchangeable, experts_of(module)):
        if experts.config._experts_implementation == "grouped_mm":
            experts.config._experts_implementation = TOGETHER


def reads_in_place(experts: Any) -> bool:
    """Whether kernels multiply few tokens by the weights of experts where they lie, and nothing
    waits for the device."""
    held = [getattr(experts, name) for name in PROJECTIONS if hasattr(experts, name)]
    return (
        _is_exchangeable(experts)
        and not hasattr(experts, "arriving")
        and has_triton(next(experts.parameters()).device)
        and all(
            isinstance(each, nn.Parameter) or each.in_place(experts.is_transposed) for each in held
        )
    )


def _together(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    if _few(experts, chosen):
        return _in_place(experts, hidden, chosen, shares)
    out: Tensor = grouped_mm_experts_forward(experts, hidden, chosen, shares)
    return out


def _few(experts: Any, chosen: Tensor) -> bool:
    return chosen.numel() <= experts.num_experts and reads_in_place(experts)


def _in_place(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    each, size = chosen.flatten(), (*chosen.shape, -1)
    made = _inner(experts, lambda name: _products(experts, name, hidden, each))
    made = _products(experts, "down_proj", made, each)
    if experts.has_post_expert_norm:
        made = experts.post_expert_norm(made)
    out: Tensor = (made.view(size) * shares[..., None]).sum(1)
    return out.to(hidden.dtype)


def _inner(experts: Any, product: Callable[[str], Tensor]) -> Tensor:
    if experts.has_gate:
        return experts._apply_gate(product("gate_up_proj"))  # type: ignore[no-any-return]
    return experts.act_fn(product("up_proj"))  # type: ignore[no-any-return]


def _products(experts: Any, name: str, rows: Tensor, chosen: Tensor) -> Tensor:
    """Rows by one matrix each, or by several, `(chosen, outputs)`."""
    from kvlite.ops.triton_experts import multiply

    weights = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    if isinstance(weights, PackedExperts):
        return weights.products(rows, chosen, bias)
    return multiply(rows, chosen, weights.mT if experts.is_transposed else weights, bias)


def _one_by_one(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """What experts make of tokens `(n, hidden size)`; `chosen` are each token's, `(n, top k)`, and
    `shares` their weights. A module may have an own `arriving`, which says where each lies."""
    if _few(experts, chosen):
        return _in_place(experts, hidden, chosen, shares)
    out = torch.zeros_like(hidden)
    for expert, at in getattr(experts, "arriving", _where_they_are)(chosen):
        _add(out, experts, expert, at, hidden, chosen, shares)
    return out


def _scaled_before(experts: Any, hidden: Tensor) -> Tensor:
    """What experts make of tokens `(experts * n, hidden size)`, all of them once for each expert:
    zeros where they are not routed to it, else scaled by their share."""
    given = hidden.unflatten(0, (experts.num_experts, -1))
    out, routed = torch.zeros_like(given), given.any(-1)
    chosen = routed if given.is_meta else routed.nonzero()[:, :1]
    for expert, at in getattr(experts, "arriving", _where_they_are)(chosen):
        rows = slice(None) if given.is_meta else routed[expert]
        gate, up = _product(experts, "gate_up_proj", expert, at, given[expert, rows]).chunk(2, -1)
        made = up * experts.act_fn(gate)
        out[expert, rows] = _product(experts, "down_proj", expert, at, made)
    return out.flatten(0, 1)


def _add(
    out: Tensor, experts: Any, expert: int, at: int, hidden: Tensor, chosen: Tensor, shares: Tensor
) -> None:
    """Add the part of one expert, whose weights lie `at`, to `out`; of the one before nothing is
    there any more."""
    here = chosen == expert
    rows = here.any(-1).nonzero()[:, 0]
    own = shares.masked_fill(~here, 0).sum(-1)[rows, None]
    made = _inner(experts, lambda name: _product(experts, name, expert, at, hidden[rows]))
    made = _product(experts, "down_proj", expert, at, made) * own
    out.index_add_(0, rows, made.to(out.dtype))


def _where_they_are(chosen: Tensor) -> Iterator[tuple[int, int]]:
    # For a plan one expert that is given all tokens takes as much as any.
    used = [0] if chosen.is_meta else chosen.unique().tolist()
    return zip(used, used, strict=True)


def _product(experts: Any, name: str, expert: int, at: int, rows: Tensor) -> Tensor:
    held = getattr(experts, name)
    if isinstance(held, PackedExperts):
        out = held.product(rows, at, experts.is_transposed)
    else:
        out = _by(rows, held[at], experts.is_transposed)
    return out + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else out


def _by(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return rows @ weight if transposed else F.linear(rows, weight)
