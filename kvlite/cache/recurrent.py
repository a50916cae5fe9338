"""The states of recurrent layers, of a fixed size however much was read.

A step computes new states, which take effect when it has ended, so a failed one can be repeated
from the same. Only a program (`engine.step_program`) changes its own states in place: what keeps
states copies them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from kvlite.ops.recurrence import Recurrence, StateBefore


@dataclass(frozen=True)
class RecurrentState:
    """The state of one recurrent layer.

    Attributes:
        conv: the last inputs of its convolution, `(batch, channels, kernel size)`.
        recurrent: the sum that it carries on, `(batch, heads, ...)`; None for a convolution alone.
    """

    conv: Tensor | None = None
    recurrent: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [each for each in (self.conv, self.recurrent) if each is not None]

    def take(self, other: "RecurrentState") -> None:
        """Become another state of the same shape, in place."""
        for own, given in zip(self.tensors, other.tensors, strict=True):
            own.copy_(given)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "RecurrentState":
        """What a function makes of it, tensor by tensor."""
        parts = self.conv, self.recurrent
        return RecurrentState(*(None if each is None else change(each) for each in parts))


States = Mapping[int, RecurrentState]
"""States of the recurrent layers that run together with one attention layer, by their place among
these; empty before anything was read."""


def state_tensors(states: Mapping[int, States]) -> list[Tensor]:
    """All tensors of the states of all layers."""
    return [each for own in states.values() for state in own.values() for each in state.tensors]


def copies_of(
    states: Mapping[int, States], device_of: Callable[[int], torch.device]
) -> dict[int, States]:
    """Copies of the states of all layers, each on the device that it says for the layer."""
    made = dict[int, States]()
    for index, own in states.items():
        copy = partial(torch.Tensor.to, device=device_of(index), copy=True)
        made[index] = {place: state.mapped(copy) for place, state in own.items()}
    return made


def joined(states: Sequence[States]) -> States:
    """The states of several sequences as those of one batch."""
    parts = {place: [each[place] for each in states] for place in states[0]}
    return {
        place: RecurrentState(
            _cat([each.conv for each in own]), _cat([each.recurrent for each in own])
        )
        for place, own in parts.items()
    }


def parted(states: States, rows: int) -> list[dict[int, RecurrentState]]:
    """The states of a batch as those of its sequences, in storage of their own."""
    every = (partial(_row, row) for row in range(rows))
    return [{place: state.mapped(own) for place, state in states.items()} for own in every]


def _cat(parts: Iterable[Tensor | None]) -> Tensor | None:
    held = [each for each in parts if each is not None]
    return torch.cat(held) if held else None


def _row(row: int, state: Tensor) -> Tensor:
    return state[row : row + 1].clone()


class StateCarrier:
    """Stands in for transformers' cache when recurrent layers run: it provides the states before,
    and takes the states after.

    Attributes:
        before, after: the states of the layers that run together.
        first: the number of the first of these layers in the model.
    """

    def __init__(self, before: States) -> None:
        self.before = before
        self.after: dict[int, RecurrentState] = {}
        self.first = 0

    def after_tokens(self, count: int) -> States:
        """The states after the first `count` tokens: here, after all."""
        return self.after

    def begin(self, first: int) -> Self:
        """Serve the layers from number `first` on, from the states before."""
        self.first, self.after = first, {}
        return self

    def has_previous_state(self, layer_idx: int) -> bool:
        """As transformers' caches have it, like the functions below."""
        return layer_idx - self.first in self.before

    def is_recording_past(self, layer_idx: int) -> bool:
        """It never is."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A copy, which is the state after if it is changed in place."""
        return self._copied(layer_idx - self.first, "conv")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As `get_conv_state`."""
        return self._copied(layer_idx - self.first, "recurrent")

    def _copied(self, place: int, part: str) -> Tensor | None:
        before = getattr(self.before.get(place), part, None)
        if before is not None:
            self._keep(place, **{part: (before := before.clone())})
        return before

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Take inputs `(batch, channels, L)`; returns them behind those before."""
        place, size = layer_idx - self.first, conv_kernel_size or conv_states.shape[-1]
        conv, inputs = self.before.get(place, RecurrentState()).conv, conv_states
        if conv is not None:
            inputs = torch.cat([conv, inputs], -1)
        elif inputs.shape[-1] < size:
            inputs = nn.functional.pad(inputs, (size - inputs.shape[-1], 0))
        self._keep(place, conv=inputs[..., -size:].clone())
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        """Take the state after, which may be a part of something larger."""
        self._keep(layer_idx - self.first, recurrent=recurrent_states.clone())
        return recurrent_states

    def _keep(self, place: int, **parts: Tensor) -> None:
        self.after[place] = replace(self.after.get(place, RecurrentState()), **parts)


class StatesAhead(StateCarrier):
    """Carries states through several tokens, of which perhaps only the first ones will count: the
    states after each token are known."""

    def __init__(self, before: States) -> None:
        super().__init__(before)
        self._inputs: dict[int, Tensor] = {}
        self._recurrences: dict[int, Recurrence] = {}

    def after_tokens(self, count: int) -> States:
        """The states after the first `count` tokens, at least one."""
        return {place: self._after(place, count) for place in self.before}

    def _after(self, place: int, count: int) -> RecurrentState:
        before, inputs, conv = self.before[place].conv, self._inputs.get(place), None
        if before is not None and inputs is not None:
            conv = inputs[..., count : count + before.shape[-1]].clone()
        recurrence = self._recurrences.get(place)
        return RecurrentState(conv, None if recurrence is None else recurrence.after(count))

    def is_recording_past(self, layer_idx: int) -> bool:
        """It is: several tokens change no state in place."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As it was."""
        return self.before[layer_idx - self.first].conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """What lets transformers' functions be replaced by those for few tokens."""
        recurrent = self.before[layer_idx - self.first].recurrent
        return None if recurrent is None else StateBefore(recurrent)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """As of all carriers."""
        place = layer_idx - self.first
        conv = self.before[place].conv
        assert conv is not None
        inputs = self._inputs[place] = torch.cat([conv, conv_states], -1)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0
    ) -> Any:
        """Take what the functions for few tokens give."""
        self._recurrences[layer_idx - self.first] = recurrent_states
        return recurrent_states
