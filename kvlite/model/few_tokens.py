"""Lets transformers' recurrent layers tell what their state is after each of a few tokens."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kvlite.ops.recurrence import StateBefore, delta_rule, state_space

# transformers' functions that take many tokens to one state.
FEW: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "mamba2_chunk_scan": state_space,
}


@dataclass(frozen=True)
class EitherWay:
    """A function of transformers', and what is called instead of it where a carrier of states asks
    for the state after each token (`cache.recurrent.StatesAhead`)."""

    many: Callable[..., Any]
    few: Callable[..., Any]

    def __call__(self, *args: Any, **given: Any) -> Any:
        """What one of them gives."""
        state = given.get("initial_state", given.get("initial_states"))
        return (self.few if isinstance(state, StateBefore) else self.many)(*args, **given)


def take_few_tokens(layer: nn.Module) -> None:
    """Replace the functions that the class of a recurrent layer calls, for all of its kind. Whoever
    else calls them gets the same from them."""
    source = sys.modules[type(layer).__module__]
    for name, few in FEW.items():
        many = getattr(source, name, None)
        if many is not None and not isinstance(many, EitherWay):
            setattr(source, name, EitherWay(many, few))
