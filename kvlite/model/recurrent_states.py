"""What the recurrent layers of a model keep, from its config alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kvlite.cache.recurrent import RecurrentState, States
    from kvlite.model.shape import ModelShape


@dataclass(frozen=True)
class StateShape:
    """The state of one recurrent layer, for one sequence.

    Attributes:
        place: of the layer, among those that run together with one attention layer.
        conv, recurrent: shapes of its parts, without the batch; None where there is none.
        recurrent_itemsize: bytes of a number of `recurrent`; None if it has the model's type, as
            `conv` has.
    """

    place: int
    conv: tuple[int, ...] | None
    recurrent: tuple[int, ...] | None
    recurrent_itemsize: int | None

    def nbytes(self, itemsize: int) -> int:
        """Bytes of it, where numbers of the model's type have `itemsize`."""
        conv = 0 if self.conv is None else prod(self.conv) * itemsize
        if self.recurrent is None:
            return conv
        return conv + prod(self.recurrent) * (self.recurrent_itemsize or itemsize)

    def holds(self, state: "RecurrentState", dtype: "torch.dtype") -> bool:
        """Whether a state of one sequence has these shapes, in a model of `dtype`."""
        size = dtype.itemsize
        parts = (
            (state.conv, self.conv, size),
            (state.recurrent, self.recurrent, self.recurrent_itemsize or size),
        )
        return all(
            shape is None
            if part is None
            else (shape is not None and part.shape == (1, *shape) and part.element_size() == bytes_)
            for part, shape, bytes_ in parts
        )


def require_states(
    states: "Mapping[int, States]", shape: "ModelShape", dtype: "torch.dtype"
) -> None:
    """Raises SnapshotError unless these are the states of a model of this shape, in `dtype`, after
    something was read; or there are none."""
    from kvlite.cache.sound import require

    expected = {
        index: {each.place: each for each in own} for index, own in enumerate(shape.states) if own
    }
    require(not states or states.keys() == expected.keys())
    for index, own in states.items():
        require(own.keys() == expected[index].keys())
        require(all(each.holds(own[place], dtype) for place, each in expected[index].items()))


def state_shapes(
    module: Any, layer_groups: tuple[tuple[str, ...], ...], recurrent: tuple[str, ...]
) -> tuple[tuple[StateShape, ...], ...]:
    """The states of each layer of the engine, by running one of each `recurrent` kind of
    transformers' model on the meta device, in bfloat16."""
    known: dict[str, StateShape | None] = {}
    number, shapes = 0, []
    for group in layer_groups:
        own = []
        for place, kind in enumerate(group):
            if kind in recurrent and kind not in known:
                known[kind] = _ran(module, number + place)
            if (found := known.get(kind)) is not None:
                own.append(replace(found, place=place))
        shapes.append(tuple(own))
        number += len(group)
    return tuple(shapes)


def _ran(module: Any, number: int) -> StateShape | None:
    import torch

    from kvlite.cache.recurrent import StateCarrier

    carrier = StateCarrier({}).begin(number)
    hidden = torch.empty(1, 1, module.config.hidden_size, dtype=torch.bfloat16, device="meta")
    with torch.inference_mode():
        module.model.layers[number](hidden, position_embeddings=None, past_key_values=carrier)
    state = carrier.after.get(0)
    if state is None:
        return None
    conv, recurrent = (
        None if each is None else tuple(each.shape[1:]) for each in (state.conv, state.recurrent)
    )
    own = state.recurrent
    itemsize = None if own is None or own.dtype == torch.bfloat16 else own.element_size()
    return StateShape(0, conv, recurrent, itemsize)
