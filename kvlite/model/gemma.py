"""Gemma 3n and 4: what goes from layer to layer beside one hidden state, and layers that attend to
keys of an earlier one.

To the engine a hidden state is what `Carried` makes of it: the streams of Gemma 3n side by side,
then the token's number, as three digits of base 256, which every type of float holds exactly. From
the number a layer's own input is made where the layer is, so no table of all layers is carried.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.model.layers import LayerGroup
from kvlite.model.packed_linear import PackedEmbedding, PackedWeights

DIGITS, BASE = 3, 256


class Carried:
    """Packs and unpacks what is carried from layer to layer, for a language model of transformers.

    Attributes:
        size: of one hidden state.
        streams: how many there are for a token.
        input_size: of what each layer is told of the token; 0 if nothing.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        self.size: int = config.hidden_size
        self.streams: int = getattr(config, "altup_num_inputs", 1)
        self.input_size: int = config.hidden_size_per_layer_input or 0

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What comes into the first layer, from token ids `(batch, n)` and their embeddings."""
        streams = [hidden]
        if self.streams > 1:
            streams += self._as_large_as(hidden, self.model.altup_projections, [hidden])
        if self.input_size:
            digits = [ids >> shift & (BASE - 1) for shift in (0, 8, 16)]
            streams.append(torch.stack(digits, -1).to(hidden.dtype))
        return torch.cat(streams, -1)

    def end(self, carried: Tensor) -> Tensor:
        """One hidden state, to be normed, from what came out of the last layer; `(..., size)`."""
        streams = carried[..., : self.streams * self.size].unflatten(-1, (self.streams, self.size))
        first, *others = streams.unbind(-2)
        if others:
            others = self._as_large_as(first, self.model.altup_unembed_projections, others)
        return torch.stack([first, *others]).mean(0)

    def states(self, carried: Tensor) -> Tensor:
        """What a layer of transformers takes: `(batch, n, size)`, with streams before these."""
        states = carried[..., : self.streams * self.size]
        if self.streams > 1:
            states = states.unflatten(-1, (self.streams, self.size)).permute(2, 0, 1, 3)
        return states

    def changed(self, carried: Tensor, states: Tensor) -> Tensor:
        """What is carried on, with the states that a layer made."""
        if self.streams > 1:
            states = states.permute(1, 2, 0, 3).flatten(2)
        beside = carried[..., self.streams * self.size :]
        return torch.cat([states, beside], -1) if beside.shape[-1] else states

    def layer_input(self, carried: Tensor, layer: int) -> Tensor | None:
        """What a layer is told of each token, `(batch, n, input size)`."""
        if not self.input_size:
            return None
        model, config = self.model, self.model.config
        digits = carried[..., -DIGITS:].long()
        ids = digits[..., 0] + (digits[..., 1] << 8) + (digits[..., 2] << 16)
        own = slice(layer * self.input_size, (layer + 1) * self.input_size)
        projection, embedded = model.per_layer_model_projection, model.embed_tokens(ids)
        weight = getattr(projection, "weight", None)
        if isinstance(weight, PackedWeights):
            rows = embedded.reshape(-1, embedded.shape[-1])
            made = weight.matrix.outputs(own).product(rows)
            context = made.view(*embedded.shape[:-1], -1)
        elif weight is not None and weight.is_floating_point():
            context = F.linear(embedded, weight[own])
        else:
            context = projection(embedded)[..., own]
        context = model.per_layer_projection_norm(context * self.size**-0.5)
        table = model.embed_tokens_per_layer
        known = ids.where(ids < config.vocab_size_per_layer_input, 0)
        if isinstance(table, PackedEmbedding):
            said = table.of_inputs(known, own)
        else:
            said = F.embedding(known, table.weight[:, own]) * table.embed_scale.to(context.dtype)
        told: Tensor = (context + said) * 0.5**0.5
        return told

    def _as_large_as(self, one: Tensor, projections: Any, given: list[Tensor]) -> list[Tensor]:
        size = one.square().mean(-1, keepdim=True).sqrt()
        made = []
        for place, projection in enumerate(projections):
            state = projection(given[place % len(given)])
            made.append(state * size / state.square().mean(-1, keepdim=True).clamp(1e-5).sqrt())
        return made


class GemmaLayer(LayerGroup):
    """A layer with keys of its own and, behind the last of these, all that have none."""

    def __init__(
        self, layers: Mapping[int, Any], carried: Carried, borrowed: Mapping[int, int]
    ) -> None:
        """Of layers in order, by their numbers in the model; `borrowed` as of `Architecture`."""
        super().__init__(layers)
        self.carried = carried
        self.borrowed = borrowed

    def forward(self, hidden: Tensor, *, kvlite: Any, answers: bool = True, **given: Any) -> Tensor:
        """As `LayerGroup`; layers without keys take their attention from `kvlite.lender`."""
        carried, keys = self.carried, _NoKeys()
        states = carried.states(hidden)
        if not answers:
            self._attend_alone(states, shared_kv_states=keys, kvlite=kvlite, **given)
            return hidden
        for name, layer in self.layers.items():
            number = int(name)
            if number in self.borrowed:
                lender = kvlite.lender(self.borrowed[number])
                given["position_embeddings"] = lender.rotation
            else:
                lender = kvlite
            told = carried.layer_input(hidden, number)
            states = layer(
                states, per_layer_input=told, shared_kv_states=keys, kvlite=lender, **given
            )
        return carried.changed(hidden, states)

    def _attend_alone(self, states: Tensor, **given: Any) -> None:
        layer: Any = next(iter(self.layers.values()))
        if self.carried.streams > 1:
            states = layer.altup.predict(states)[layer.config.altup_active_idx]
        layer.self_attn(layer.input_layernorm(states), attention_mask=None, **given)


class _NoKeys(dict[str, tuple[None, None]]):
    """What transformers' layers leave keys in for each other, and find none in."""

    def __setitem__(self, kind: str, keys: Any) -> None:
        """Leave nothing."""

    def __missing__(self, kind: str) -> tuple[None, None]:
        return None, None
