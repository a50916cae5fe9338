"""A decode step as one program: everything that changes from token to token is on the device.

The token, its position and its slots are tensors, and the next token is drawn on the device. So the
same launches serve every token, and a CUDA graph can replay them. The host's decisions happen
between programs, in `decode.Step`: more room, quantizing entries once there are too many recent
ones, methods that resolve or trim.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache
from kvlite.cache.recurrent import copies_of
from kvlite.engine.layer_program import LayerProgram
from kvlite.engine.sampling import Sampler
from kvlite.engine.sparse_attention import sparse_masks
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.architectures import has_experts
from kvlite.model.experts import experts_of, reads_in_place
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import fixed_tables
from kvlite.model.weights import MXFP4
from kvlite.offload import Recall
from kvlite.offload.kv.recall_program import RecallClock, recall_refusal


def refusal(
    model: LoadedModel, cache: KVCache, policies: list[LayerPolicy], recall: Recall | None
) -> str | None:
    """Why the next step of a cache cannot be a program, in a few words; None if it can."""
    if model.device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    if model.layers.passing is not None:
        return "weights are streamed"
    if model.cards:
        return "layers are on several cards"
    waits = model.weights.stored or model.weights.name == "int8"
    if waits and model.weights.name not in ("nf4", MXFP4):
        return f"products with {model.weights.name} weights may wait for the host"
    if not all(map(reads_in_place, _experts(model))):
        return "experts are unpacked as a token chooses them"
    if not fixed_tables(model):
        return "the model's rotations change with the length"
    return next(
        (
            reason
            for index, (layer, policy) in enumerate(zip(cache.layers, policies, strict=True))
            if (reason := _layer_refusal(index, layer, policy, recall))
        ),
        None,
    )


def _experts(model: LoadedModel) -> Iterator[Any]:
    """Modules that may wait for CUDA, which has their tokens' choice."""
    if model.device.type == "cuda" and has_experts(model.shape.model_type):
        yield from experts_of(model.module)


def _layer_refusal(
    index: int, layer: LayerCache, policy: LayerPolicy, recall: Recall | None
) -> str | None:
    method = policy.method
    if method.decoding.trim is not None and max(used for _, used in layer.lengths) >= policy.budget:
        return f"{method.name} evicts entries of a full layer"
    if layer.shares_keys:
        return "heads share keys"
    if method.across.resolves_at == "step":
        return f"{method.name} chooses a method for each layer"
    if recall is not None and (reason := recall_refusal(recall, index, layer)):
        return reason
    rooms = [head_group.room for head_group in layer.head_groups]
    if any(rooms) and policy.mask is not None:
        return "a layer is not full yet"
    capacities = [head_group.capacity for head_group in layer.head_groups]
    every = zip(rooms, policy.capacities(layer.lengths), capacities, strict=True)
    if any(not room and size > capacity for room, size, capacity in every):
        return "a layer has to grow"
    return None


class StepProgram:
    """One token's way through all layers to the next token, for as many tokens as the cache's
    storage serves.

    Attributes:
        token, position: `(1,)` int64, of the token that goes through; a run leaves those of the
            next one.
        sampler: draws it.
        context: `(1, n)` int64, all tokens before it, if the sampler looks at them.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        policies: list[LayerPolicy],
        sampler: Sampler,
        seen: list[int],
        recall: Recall | None = None,
    ) -> None:
        """For a cache of one sequence that `refusal` has no reason against, of the tokens
        `seen`."""
        self.model, self.cache, self.policies = model, cache, [*policies]
        self.modules, self.sampler = model.layers, sampler
        self.token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.position = torch.full_like(self.token, cache.seen)
        self.clock = None if recall is None else RecallClock(recall, self.position)
        self.states = copies_of(cache.states, model.device_of)
        by_number: dict[int, LayerProgram] = {}
        each = zip(cache.layers, policies, sparse_masks(model, policies), strict=True)
        for index, (layer, policy, mask) in enumerate(each):
            by_number[index] = LayerProgram(
                *(index, layer, policy, mask, self.position, cache.seen, self.clock),
                log=cache.queries.get(index),
                states=self.states.get(index),
                lenders=by_number,
            )
        self.layers = [*by_number.values()]
        # Of all layers, where the token at position 0 would have been appended, and where this one
        # is.
        self.first = torch.cat([layer.first for layer in self.layers])
        self.slots = self.first + self.position
        own = self.slots.split([len(layer.first) for layer in self.layers])
        for layer_program, slots in zip(self.layers, own, strict=True):
            layer_program.slots = slots
        # A token that is there twice is penalized once.
        known = [*seen, *seen[:1] * self.room] if sampler.penalized else []
        self.context = torch.tensor([known], dtype=torch.int64, device=model.device)
        self.before = cache.seen - len(seen)

    @property
    def appends(self) -> bool:
        """Whether a run changes nothing that was there, so that it need not count."""
        return not any(layer.changes for layer in self.layers)

    @property
    def room(self) -> int:
        """Tokens that can still go through."""
        rooms = [room for layer in self.layers if (room := layer.room) is not None]
        return min(rooms, default=self.model.shape.max_context)

    def serves(self, cache: KVCache, policies: list[LayerPolicy]) -> bool:
        """Whether the next token of a cache can go through it. Others may have been appended in
        the meantime, or taken back."""
        return (
            cache is self.cache
            and self.model.layers is self.modules
            and all(
                own.layer is layer for own, layer in zip(self.layers, cache.layers, strict=True)
            )
            and all(own is policy for own, policy in zip(self.policies, policies, strict=True))
            and self.room > 0
        )

    def run(self) -> Tensor:
        """Put the token through the model: logits of the next one, `(1, vocab)` float32, which is
        drawn from them unless a grammar has to be asked."""
        torch.add(self.first, self.position, out=self.slots)
        if self.clock is not None:
            self.clock.tick()
        hidden = self.model.embed(self.token[:, None])
        rotations = self.model.rotations_at(self.position, self.model.dtype)
        for index, (rotation, layer) in enumerate(zip(rotations, self.layers, strict=True)):
            layer.rotation, module = rotation, self.model.step_layer(index)
            at = self.position[None]
            hidden = module(hidden, position_ids=at, position_embeddings=rotation, kvlite=layer)
            if layer.writes:
                layer.keep_states()
        logits = self.model.logits(hidden[:, -1])
        if self.sampler.on_host:  # which allows what it does once the token is known
            return logits
        if self.sampler.penalized:
            self.context.index_copy_(1, self.position - self.before, self.token[None])
        self.token.copy_(self.sampler.draw(logits, self.context))
        self.position.add_(1)
        return logits

    def rehearse(self) -> None:
        """Do everything that `run` does except writing to the cache, to trigger first-use setup."""
        generator = self.sampler.generator
        drawn = generator.get_state()
        for layer in self.layers:
            layer.writes = False
        try:
            self.run()
        finally:
            generator.set_state(drawn)
            for layer in self.layers:
                layer.writes = True

    def begin(self, token: int, seen: list[int]) -> None:
        """Let a token go through next, after those `seen`."""
        for index, own in self.states.items():
            for place, state in own.items():
                state.take(self.cache.states[index][place])
        self.token.fill_(token)
        self.position.fill_(self.cache.seen)
        if self.sampler.penalized:
            self.context[0, : len(seen)] = torch.tensor(seen)

    def end(self) -> None:
        """Count the token that went through."""
        for layer in self.layers:
            layer.advance(self.cache.seen)
        self.cache.states = self.states
        self.cache.seen += 1
        self.cache.writing = False
