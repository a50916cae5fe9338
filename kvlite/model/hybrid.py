"""Models whose layers are not all attention: the others run together with the next attention layer.

So a layer of the engine is always an attention layer, with keys and values of its own. What lies
before it (behind the last one also what follows) is part of its step and keeps a state of fixed
size (`cache.recurrent`), or nothing.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kvlite.cache.recurrent import StateCarrier
from kvlite.model.architectures import ADMITTED

if TYPE_CHECKING:
    from kvlite.model.shape import ModelShape


class HybridLayer(nn.Module):
    """An attention layer and the layers that run with it, unmodified, as one.

    Attributes:
        layers: all of them in order, by their numbers in the model.
        attention: the number of the attention layer.
        mixer, norm: the names of attention in that layer, and of the norm before it.
    """

    def __init__(self, layers: Mapping[int, Any], attention: int, mixer: str, norm: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        self.attention = str(attention)
        self.mixer, self.norm = mixer, norm
        self.first = next(iter(layers))

    def forward(self, hidden: Tensor, *, kvlite: Any, answers: bool = True, **given: Any) -> Tensor:
        """Put tokens `(batch, L, hidden size)` through all of them.

        Args:
            kvlite: runs the attention, and has a `carrier` of states for the others.
            answers: whether what comes out is wanted, as where layers are `trailing`; else queries,
                keys, values and states alone.
        """
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

    @property
    def trailing(self) -> bool:
        """Whether layers follow the attention layer."""
        numbers: list[str] = list(self.layers)
        return numbers[-1] != self.attention


def engine_layers(modules: Sequence[nn.Module], shape: "ModelShape") -> list[nn.Module]:
    """The engine's layers, of a model's own, as far as there are any."""
    own = ADMITTED[shape.model_type]
    if not own.recurrent:
        return [*modules[: shape.layers]]
    made, first = list[nn.Module](), 0
    for group in shape.layer_groups:
        layers = {first + place: modules[first + place] for place in range(len(group))}
        at = first + own.attention_in(group)
        made.append(HybridLayer(layers, at, own.attention, own.attention_norm))
        first += len(group)
        if first == len(modules):
            break
    return made
