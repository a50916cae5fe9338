"""Answering: one token a step through all layers, written in place."""

import functools
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from kvlite.cache import KVCache, KVHeadGroup, LayerCache, Selection
from kvlite.cache.query_log import QueryLog
from kvlite.cache.recurrent import StateCarrier, States
from kvlite.engine import compiled_rows, compiled_step
from kvlite.engine.heads import over_head_groups, over_what_is_held
from kvlite.engine.oom_actions import cache_oom_actions
from kvlite.engine.quantized_attention import attend_segment
from kvlite.engine.sparse_attention import SparseAttentionMask, sparse_masks
from kvlite.memory.oom import OOMPolicy, T
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import ROOM, LayerPolicy
from kvlite.methods.scores import Window
from kvlite.model.attention_interface import Lender
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation
from kvlite.offload import Recall
from kvlite.ops.attention import attend, attend_with_rows, grouped
from kvlite.ops.device import has_triton
from kvlite.ops.heads import of_heads
from kvlite.ops.softmax import Softmax


class LayerStep:
    """Runs one layer over one new token per sequence.

    If memory runs out, the layer is run again: changes that are already made are known, and are not
    made twice.

    Attributes:
        layer, policy: as they stand.
        positions: the position on the device, `(1,)` int32.
        done: what was, by KV heads of a head group.
        attended: what attention gave, if one compiled call did all.
        asked: what the method is to settle by, once all of the layer went through.
        carrier: the states of the recurrent layers that run with it, before and after the token.
        lenders: earlier layers, by number, whose entries are attended to behind this one.
    """

    def __init__(
        self,
        index: int,
        layer: LayerCache,
        policy: LayerPolicy,
        position: int,
        rotation: Rotation,
        sparse_mask: SparseAttentionMask | None = None,
        recall: Recall | None = None,
        states: States | None = None,
        positions: Tensor | None = None,
        queries: QueryLog | None = None,
        lenders: "Mapping[int, LayerStep] | None" = None,
    ) -> None:
        self.index = index
        self.layer = layer
        self.policy = policy
        self.position = position
        self.rotation = rotation
        self.sparse_mask = sparse_mask
        self.recall = recall
        self.queries = queries
        self.positions = _on_device(position, layer.keys.device) if positions is None else positions
        self.done: set[tuple[str, tuple[int, ...]]] = set()
        self.attended: Tensor | None = None
        self.asked: Window | None = None
        self.carrier = StateCarrier(states or {})
        self.lenders = lenders or {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Write the token into every head group, then attend over all of it."""
        if self.recall is not None and not self.done:
            self.recall.store.make_room(self.index)
        if self.attended is None and compiled_rows.takes(self, q, k, v):
            self.attended = compiled_rows.attend([self], q, k, v, softmax)
        if self.attended is not None:
            return self.attended
        if not self.done and not all(head_group.room for head_group in self.layer.head_groups):
            self._grow()
        if self.queries is not None:
            self.queries.write(self.positions, q, softmax)
        recall = self.recall
        if recall is not None:
            add = partial(recall.store.answer, self.index, k, v, self.position)
            self._once("told", tuple(range(k.shape[1])), add)

        @functools.cache
        def wanted() -> tuple[Tensor, Tensor, float]:
            assert recall is not None
            queries, scale = _queries(q, k.shape[1], softmax.scale)
            return queries, recall.scores(self.index, queries, scale), scale

        def over(
            head_group: KVHeadGroup, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
        ) -> Tensor:
            self._once("written", head_group.heads, partial(self._write, head_group, k, v))
            if recall is not None and recall.reaches(self.index, head_group):
                come = partial(self._recall, recall, head_group)
                self._once("recalled", head_group.heads, lambda: come(*wanted()))
            return self._over_entries(head_group, q, softmax, self.policy.remembers(self.layer))

        out = over_head_groups(self.layer, q, k, v, softmax, over)
        if self.policy.method.across.resolves_at == "step":
            self.asked = Window(q, self.position, k.shape[1], softmax)
        return out

    def lender(self, index: int) -> Lender:
        """What attends to the entries of layer `index`."""
        source = self.lenders.get(index, self)
        return Lender(source.rotation, source._lend)

    def _lend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attention of the token, which is in the layer already."""
        over = partial(self._over_entries, remembers=False)
        return over_what_is_held(self.layer, q, softmax, over)

    def _over_entries(
        self, head_group: KVHeadGroup, q: Tensor, softmax: Softmax, remembers: bool
    ) -> Tensor:
        """Attention to what a head group holds; the policy remembers it, if it is to."""
        if head_group.segment is not None and self.sparse_mask is None:
            out, row = attend_segment(q, head_group, softmax, remembers=remembers)
            if remembers and row is not None:
                self._remember(head_group, row)
            return out
        keys = head_group.keys[:, :, : head_group.used]
        values = head_group.values[:, :, : head_group.used]
        if self.sparse_mask is not None:
            own = self.rotation
            return self.sparse_mask.attend(q, keys, values, self.position, own, softmax)
        if not remembers:
            return softmax.with_sinks(*attend(q, keys, values, softmax, causal=False))[0]
        out, rows = attend_with_rows(q, keys, values, softmax)
        self._remember(head_group, rows[:, :, 0])
        return out

    def _once(self, what: str, heads: tuple[int, ...], act: Callable[[], None]) -> None:
        """Do something that allocates all it needs before it changes anything, unless it was."""
        if (what, heads) not in self.done:
            act()
            self.done.add((what, heads))

    def _recall(
        self,
        recall: Recall,
        head_group: KVHeadGroup,
        queries: Tensor,
        scores: Tensor,
        scale: float,
    ) -> None:
        """Bring back what queries of all KV heads want of a head group."""
        own = of_heads(queries, head_group.heads)
        recall.bring_back(self.index, head_group, own, scores, scale)

    def _remember(self, head_group: KVHeadGroup, row: Tensor) -> None:
        add = head_group.add if self.policy.method.decoding.cumulative else head_group.record
        self._once("remembered", head_group.heads, partial(add, row))

    def _settle(self, window: Window) -> None:
        """Let the method look at the layer, and cut what it now keeps less of."""
        layer = self.layer
        view = LayerView(self.index, layer.head_groups, window, self.policy.budget)
        policy = self.policy.settled(view)
        if policy.quantize_now is not None or not policy.keeps_all(view.lengths):
            layer = policy.cut(view, ROOM)
        self.policy, self.layer, self.asked = policy, layer, None

    def _grow(self) -> None:
        """Take more storage, where the policy lets a full line grow."""
        sizes = self.policy.capacities(self.layer.lengths)
        if any(
            size > head_group.capacity
            for size, head_group in zip(sizes, self.layer.head_groups, strict=True)
        ):
            rows, bits = self.policy.method.decoding.rows, self.policy.quantize_now
            self.layer = self.layer.resized(sizes, rows, bits)

    def _write(self, head_group: KVHeadGroup, k: Tensor, v: Tensor) -> None:
        if head_group.room:
            head_group.append(k, v, self.positions)
        else:
            evict = self.policy.method.decoding.evict
            assert evict is not None, "a head group that may grow has room"
            slots = evict(head_group, self.policy.budget, self.position)
            head_group.overwrite(slots, k, v, self.position)

    def trimmed(self) -> LayerCache:
        """The layer after the step: smaller, in storage of its own, if the method cuts it now."""
        if self.asked is not None:
            self._settle(self.asked)
        decoding, head_groups = self.policy.method.decoding, self.layer.head_groups
        if decoding.trim is None:
            return self.layer
        kept = [decoding.trim(head_group, self.policy.budget) for head_group in head_groups]
        if all(slots is None for slots in kept):
            return self.layer
        selections = [
            Selection.everything(head_group) if slots is None else Selection(head_group, slots)
            for head_group, slots in zip(head_groups, kept, strict=True)
        ]
        sizes = self.policy.capacities([each.length for each in selections])
        bits = self.policy.quantize_now
        return LayerCache.gathered(selections, sizes, decoding.rows, bits=bits)


def _on_device(position: int, device: torch.device) -> Tensor:
    return torch.full((1,), position, dtype=torch.int32, device=device)


def _queries(q: Tensor, kv_heads: int, scale: float) -> tuple[Tensor, float]:
    """One token's queries by KV head, `(batch, kv heads, rows, dim)`, and what is left to multiply
    them by; kernels do that themselves."""
    queries = grouped(q, kv_heads)[:, :, :, 0]
    kernels = has_triton(q.device, q.shape[3])
    return (queries, scale) if kernels else (queries.float() * scale, 1.0)


class Step:
    """One token per sequence on its way through the layers. If memory runs out and something can be
    given up, it resumes after the last finished layer; otherwise it can be run again later.

    Attributes:
        hidden: `(batch, 1, hidden size)`, what comes into the next layer.
        index: that layer.
        step: through it, once it has begun.
        through: what came out of it, before the layer itself is settled.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        token_ids: Tensor,
        policies: list[LayerPolicy],
        recall: Recall | None = None,
        oom_policy: OOMPolicy | None = None,
    ) -> None:
        """As in `decode_step`."""
        cache.require_whole()
        self.model = model
        self.cache = cache
        self.policies = policies
        self.recall = recall
        self.oom_policy = oom_policy
        self.oom_actions = cache_oom_actions(model, cache, policies)
        self.index, self.seen = 0, cache.seen
        self.hidden = model.embed(token_ids[:, None])
        self.rotations = model.rotations(cache.seen, 1)
        self.positions = model.by_layer(_on_device(cache.seen, model.device))
        self.sparse_masks = sparse_masks(model, policies)
        self.step: LayerStep | None = None
        self.through: Tensor | None = None

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Go through the layers that are left; logits of the next token.

        Raises:
            OutOfMemory: with an OOM policy, if nothing is left to give up; the step can be run
                again.
        """
        self.cache.writing = True
        model = self.model
        while self.index < len(self.policies):
            if not self._safely(lambda: compiled_step.through_layers(model, [self])):
                self.go_on()
        return self.end(self._safely(lambda: model.logits(self.hidden[:, -1])))

    def _safely(self, work: Callable[[], T]) -> T:
        """Do a part of the step that can be done again."""
        return work() if self.oom_policy is None else self.oom_policy.run(work, self.oom_actions)

    def go_on(self) -> None:
        """Go through the next layer, or on with it. Errors are those of `run`."""
        self._safely(self._layer)

    def _layer(self) -> None:
        index, step = self.index, self.begin_layer()
        try:
            if self.through is None:
                module, rotation = self.model.step_layer(index), self.rotations[index]
                self.through = module(
                    self.hidden.to(self.model.device_of(index)),
                    position_ids=self.positions[index][None],
                    position_embeddings=rotation,
                    kvlite=step,
                )
            trimmed = step.trimmed()
        finally:
            self.leave_layer()
        self.cache.layers[index] = trimmed
        if step.carrier.after:
            self.cache.states[index] = step.carrier.after
        self.hidden, self.index, self.step, self.through = self.through, index + 1, None, None

    def begin_layer(self) -> LayerStep:
        """The step through the next layer, which may have become smaller since it began."""
        index, lenders = self.index, self.model.shape.lenders
        if self.step is None:
            self.step = self.through_layer(index)
        self.step.layer, self.step.policy = self.cache.layers[index], self.policies[index]
        self.step.lenders = {each: self.through_layer(each) for each in lenders if each < index}
        return self.step

    def through_layer(self, index: int) -> LayerStep:
        """A step through a layer."""
        return LayerStep(
            index,
            self.cache.layers[index],
            self.policies[index],
            self.cache.seen,
            self.rotations[index],
            self.sparse_masks[index],
            self.recall,
            self.cache.states.get(index),
            self.positions[index],
            self.cache.queries.get(index),
        )

    def leave_layer(self) -> None:
        """Put the layer where what is given up next is looked for, however far it got."""
        assert self.step is not None
        self.cache.layers[self.index] = self.step.layer
        self.policies[self.index] = self.step.policy

    def end(self, logits: Tensor) -> Tensor:
        """Let the token count, which went through all layers and gave these logits."""
        if self.cache.hidden is not None:
            self.cache.hidden.write(self.seen, self.hidden)
        self.cache.seen = self.seen + 1
        self.cache.writing = False
        return logits


@torch.inference_mode()
def decode_step(
    model: LoadedModel,
    cache: KVCache,
    token_ids: Tensor,
    policies: list[LayerPolicy],
    recall: Recall | None = None,
) -> Tensor:
    """Put one token a sequence through the model.

    Args:
        token_ids: `(batch,)` int64.
        policies: one a layer; where a method leaves layers to others at the first step, that is put
            here.
        recall: takes the token too, and brings back what it wants.

    Returns:
        Logits of the next token, `(batch, vocab)` float32.
    """
    return Step(model, cache, token_ids, policies, recall).run()
