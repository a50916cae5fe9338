"""Models whose layers are not all attention: the others run together with the next attention layer.

So a layer of the engine is always an attention layer, with keys and values of its own. What lies
before it (behind the last one also what follows) is part of its step and keeps a state of fixed
size (`cache.recurrent`), or nothing.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kvlite.cache.recurrent import StateCarrier
from kvlite.model.architectures import architecture
from kvlite.model.gemma import Carried, GemmaLayer
from kvlite.model.layers import LayerGroup
from kvlite.ops.recurrence import StateBefore, delta_rule, state_space

if TYPE_CHECKING:
    from kvlite.model.shape import ModelShape

# transformers' functions that take many tokens to one state, and those that tell each token's.
_FEW: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "mamba2_chunk_scan": state_space,
}


@dataclass(frozen=True)
class _EitherWay:
    """A function of transformers', and what is called instead of it where a carrier of states asks
    for the state after each token (`cache.recurrent.StatesAhead`)."""

    many: Callable[..., Any]
    few: Callable[..., Any]

    def __call__(self, *args: Any, **given: Any) -> Any:
        state = given.get("initial_state", given.get("initial_states"))
        return (self.few if isinstance(state, StateBefore) else self.many)(*args, **given)


def take_few_tokens(layer: nn.Module) -> None:
    """Replace the functions that the class of a recurrent layer calls, for all of its kind. Whoever
    else calls them gets the same from them."""
    source = sys.modules[type(layer).__module__]
    for name, few in _FEW.items():
        many = getattr(source, name, None)
        if many is not None and not isinstance(many, _EitherWay):
            setattr(source, name, _EitherWay(many, few))


class HybridLayer(LayerGroup):
    """An attention layer and the layers that run with it, unmodified, as one.

    Attributes:
        attention: the number of the attention layer.
        mixer, norm: the names of attention in that layer, and of the norm before it.
    """

    def __init__(self, layers: Mapping[int, Any], attention: int, mixer: str, norm: str) -> None:
        super().__init__(layers)
        self.attention = str(attention)
        self.mixer, self.norm = mixer, norm
        self.first = next(iter(layers))
        self.trailing = [*layers][-1] != attention
        for layer in layers.values():
            take_few_tokens(layer)

    def forward(self, hidden: Tensor, *, kvlite: Any, answers: bool = True, **given: Any) -> Tensor:
        """As `LayerGroup`; `kvlite` has a `carrier` of states for the others."""
        carrier: StateCarrier = kvlite.carrier.begin(self.first)
        layer: Any
        for number, layer in self.layers.items():
            if number != self.attention:
                hidden = layer(hidden, past_key_values=carrier, **given)
            elif answers:
                hidden = layer(hidden, kvlite=kvlite, **given)
            else:
                seen = getattr(layer, self.norm)(hidden)
                getattr(layer, self.mixer)(seen, attention_mask=None, kvlite=kvlite, **given)
        return hidden


def engine_layers(model: Any, carried: Carried | None, shape: "ModelShape") -> list[nn.Module]:
    """The engine's layers, of a language model's own, as far as there are any."""
    own, made, first = architecture(shape.model_type), list[nn.Module](), 0
    for group in shape.layer_groups:
        numbers = range(first, min(first + len(group), len(model.layers)))
        layers = {number: model.layers[number] for number in numbers}
        if carried is not None and layers:
            made.append(GemmaLayer(layers, carried, own.borrowed(model.config)))
        elif own.recurrent and layers:
            at = first + own.attention_in(group)
            made.append(HybridLayer(layers, at, own.attention, own.attention_norm))
        else:
            made += layers.values()
        first += len(group)
    return made
