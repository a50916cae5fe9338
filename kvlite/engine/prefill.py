"""Layer-major prefill: all new tokens go through one layer, which is compressed before the next.

It is exact (the same logits as reading in one piece) unless the method changes the prefill. Its
peak is the hidden states, one layer's keys and values, the compressed layers before it, and one
chunk's activations.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache
from kvlite.cache.hidden_log import ROWS
from kvlite.cache.layer import Mark
from kvlite.cache.recurrent import States, copies_of
from kvlite.engine.cache_growth import grows, rewound, roomy_copy, shrunk
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks, ReadingBytes
from kvlite.engine.implementations import sums_in_tiles
from kvlite.engine.layer_prefill import LayerPrefill
from kvlite.engine.oom_actions import cache_oom_actions
from kvlite.engine.prefill_oom import embedded, may_wait, prefill_oom_actions, reserve_for, shorten
from kvlite.engine.reconstruct import reconstruction_pass
from kvlite.engine.slices import Slices, whole
from kvlite.engine.sparse_attention import require_served, sparse_masks
from kvlite.errors import require_uncancelled
from kvlite.memory.oom import HIDDEN, OOMPolicy, T
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import (
    ROOM,
    LayerPolicy,
    merge_below,
    require_apart,
    shares,
    take_share,
)
from kvlite.methods.placement import ON_DEVICE, ScoringBackend
from kvlite.model.load import LoadedModel
from kvlite.model.structure import structural
from kvlite.offload import HostKVStore

CHUNK = 1024


class Prefill:
    """New tokens on their way through the layers, one layer at a time.

    Attributes:
        layers: what was kept of those that were read.
        hidden: `(batch, n, hidden size)` of the tokens still on their way, on the device, or in
            host memory where it was short on the device.
        rows: `(n,)` int64, which of the new tokens these are; None while it is all of them.
        reconstruction_pass: of what was read, if a method judges by that.
        reconstructed: tokens that the cache will hold judgements of.
        states: by layer, of the recurrent layers that run with those that were read.
        lenders: layers that were read, by number, whose entries later ones attend to.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        token_ids: Tensor,
        policies: list[LayerPolicy],
        *,
        reserve: int = 0,
        chunk: int = CHUNK,
        callbacks: Callbacks = NO_CALLBACKS,
        context: Tensor | None = None,
        store: HostKVStore | None = None,
        backend: ScoringBackend = ON_DEVICE,
        oom_policy: OOMPolicy | None = None,
        whole: bool = False,
    ) -> None:
        """As in `prefill`.

        Args:
            whole: take every token, not the last alone, through the rest of the final layer, so
                that `hidden` has what follows each of them.
        """
        if store is None or not store.begun:
            cache.require_whole()
            require_apart(policies, cache.layers)
        require_served(model, policies, cache.layers, cache.seen)
        self.model, self.cache, self.store = model, cache, store
        self.backend, self.oom_policy = backend, oom_policy
        if store is not None:
            store.mark()
        self.layers: list[LayerCache] = []
        self.states: dict[int, States] = {}
        self.lenders: dict[int, LayerPrefill] = {}
        self.policies = policies
        self.reserve, self.room = reserve, min(reserve, ROOM)
        self.chunk, self.callbacks, self.whole = chunk, callbacks, whole
        self.start, self._before = cache.seen, cache.states
        if store is not None and store.begun:
            self.start, self._before = store.seen, copies_of(store.states, model.device_of)
        self.new, self.end = token_ids.shape[1], self.start + token_ids.shape[1]
        token_ids = token_ids.to(model.device)
        self.hidden = embedded(model, token_ids, chunk, oom_policy)
        self.rows: Tensor | None = None
        self.rotations = model.rotations(self.start, self.new)
        self.sparse_masks = sparse_masks(model, policies)
        positions = torch.arange(self.start, self.end, dtype=torch.int32, device=model.device)
        self.positions = model.by_layer(positions)
        self.marks: dict[int, list[Mark]] = {}
        before = [] if context is None else [context.to(model.device)]
        everything = torch.cat([*before, token_ids], 1)
        self.reconstruction_pass = reconstruction_pass(
            model, cache, policies, store, everything, new=self.new, end=self.end, chunk=chunk
        )
        looks = any(policy.method.needs_text for policy in policies)
        self.structural = structural(model.tokenizer, everything) if looks else None
        reconstructs = any(policy.method.prefilling.reconstruction for policy in policies)
        self.reconstructed = cache.reconstructed if reconstructs else 0
        if self.reconstruction_pass is not None:
            self.reconstructed = self.end
        self.capacities = [[each.capacity for each in layer.head_groups] for layer in cache.layers]

    def read_layer(self, index: int) -> Slices[LayerPrefill]:
        """Take all tokens through one layer; may wait after every chunk; sent seconds, it reads on
        in shorter ones. Free what it returns before the next: it holds all keys and values.

        Raises:
            Stopped: `callbacks.cancel` was set.
        """
        if self.oom_policy is not None:
            reserve_for(self, index, self.oom_policy)
        self._safely(partial(self._cross, index))
        layer_prefill = self._safely(partial(self._layer_prefill, index))
        at, length = self._begin(index), self.hidden.shape[1]
        layer_prefill.done = at
        while at < length:
            require_uncancelled(self.callbacks.cancel)
            at = self._safely(partial(self._read_chunk, index, layer_prefill, at))
            self._held(layer_prefill.layer)
            self._passed(index, at * self.new // length)
            if (yield):
                shorten(self, index)
        if layer_prefill.states:
            self.states[index] = layer_prefill.states
        if self.reconstruction_pass is not None:
            again = self.reconstruction_pass.rate(
                index, layer_prefill, answers=index < len(self.policies) - 1, safely=self._safely
            )
            for rows in again:
                self._passed(index, self.new + rows)
                require_uncancelled(self.callbacks.cancel)
                yield
        return layer_prefill

    def _cross(self, index: int) -> None:
        """Bring what is on its way to a layer's device, unless it waits in host memory."""
        device = self.model.device_of(index)
        if self.hidden.device.type == device.type:
            self.hidden = self.hidden.to(device)
        if self.rows is not None:
            self.rows = self.rows.to(device)

    def _layer_prefill(self, index: int) -> LayerPrefill:
        """What reads a layer, with room for all that it will."""
        (cos, sin), at = self.rotations[index], self.positions[index]
        if self.rows is not None:
            cos, sin, at = cos[:, self.rows], sin[:, self.rows], at[self.rows]
        policy, layer = self.policies[index], self._roomy(index)
        layer_prefill = LayerPrefill(
            layer,
            policy,
            at,
            self.end,
            (cos, sin),
            self.sparse_masks[index],
            measures=self.store is not None,
            states=self._before.get(index),
            log=self.cache.queries.get(index),
            lenders=self.lenders,
            structural=self.structural,
            in_tiles=sums_in_tiles(self.model, layer.keys),
        )
        if policy.method.decoding.cumulative and self.cache.reconstructed:
            layer.clear_rows()  # they hold what a reconstruction found, not sums
        if index in self.model.shape.lenders:
            self.lenders[index] = layer_prefill
        return layer_prefill

    def _begin(self, index: int) -> int:
        """The row of the hidden states to begin with."""
        return 0

    def _read_chunk(self, index: int, layer_prefill: LayerPrefill, at: int) -> int:
        """Take a chunk through a layer, from row `at` of the hidden states on; the row after it."""
        length, final = self.hidden.shape[1], self._is_final(index)
        # Of the final layer's output nothing is read but the last token's, and what is logged.
        tail = length - min(length, 1 if self.cache.hidden is None else ROWS)
        span = slice(at, min(at + self.chunk, tail if final and at < tail else length))
        cumulative = layer_prefill.policy.method.decoding.cumulative
        answers = not final or span.stop > tail or cumulative
        hidden = self.hidden[:, span].to(self.model.device_of(index))
        self.hidden[:, span] = layer_prefill.take(self.model.layers[index], hidden, answers=answers)
        return span.stop

    def _passed(self, index: int, rows: int) -> None:
        """Say how far reading is: rows of layer `index`, those of a repetition after the tokens."""
        if self.callbacks.progress is not None:
            again = self.reconstruction_pass
            each = self.new + (0 if again is None else again.rows)
            self.callbacks.progress(index * each + rows, len(self.policies) * each)

    def _held(self, layer: LayerCache) -> None:
        """Say what is held while a layer is read."""
        if self.callbacks.reading is not None:
            kept, held = sum(each.nbytes for each in self.layers), {*map(id, self.cache.layers)}
            within = sum(each.nbytes for each in (*self.layers, layer) if id(each) in held)
            of_layers = layer.nbytes, kept, within
            self.callbacks.reading(ReadingBytes(self.new, self.hidden.nbytes, *of_layers))

    def read(self) -> Slices[Tensor]:
        """Take all tokens through all layers, compressing each as soon as it is done; next-token
        logits, as of `logits`.

        Raises:
            Stopped: `callbacks.cancel` was set.
            OutOfMemory: nothing is left to give up that may be.
        """
        for index in range(len(self.policies)):
            self.layers.append((yield from self.compressed(index)))
            self._safely(partial(merge_below, self.layers, self.policies, index, self.room))
            yield
        shared = self._safely(lambda: shares(self.layers, self.policies, self.backend))
        for index, kept in shared:
            self._safely(partial(take_share, self.layers, self.policies, index, kept, self.room))
        return self._safely(self.logits)

    def compressed(self, index: int) -> Slices[LayerCache]:
        """One layer read, and what its policy keeps of it; all of it, if it is to be merged."""
        layer_prefill = yield from self.read_layer(index)
        view = self._safely(lambda: layer_prefill.view(index, self.backend))
        self.remember(index, layer_prefill)
        self._safely(lambda: self._prune_tokens(view))
        return self._safely(lambda: self._cut(index, layer_prefill.layer, view))

    def _cut(self, index: int, layer: LayerCache, view: LayerView) -> LayerCache:
        """What the policy of a layer keeps of it."""
        # It may have been given less since the layer began.
        policy = self.policies[index]
        view = replace(view, budget=policy.budget)
        if policy.method.across.resolves_at == "read":
            policy = policy.settled(view)
        if index not in self.marks and policy.partner is None:
            layer = policy.cut(view, self.room)
        else:
            if policy.quantize_now is not None:  # since it began
                sizes = [head_group.capacity for head_group in layer.head_groups]
                layer = layer.resized(sizes, layer.rows, policy.quantize_now)
            policy.seed_attention_rows(layer, view.window)
        if index in self.marks:
            self.cache.layers[index] = layer
        self.policies[index] = policy
        return layer

    def remember(self, index: int, layer_prefill: LayerPrefill) -> None:
        """Hand the host store, if there is one, what was read and how a method scored it."""
        store, query_sq_sum = self.store, layer_prefill.query_sq_sum
        if store is None or query_sq_sum is None:
            return
        layer, method, new = layer_prefill.layer, self.policies[index].method, self.hidden.shape[1]
        self._safely(lambda: store.add(index, layer, query_sq_sum, new, self.reserve))
        if method.caches_scores and layer.rows:
            self._safely(lambda: store.add_scores(index, layer.scores(), method.spec))

    def _prune_tokens(self, view: LayerView) -> None:
        """Leave behind the tokens that the next layer is not given."""
        after, through = self.policies[view.layer + 1 :], self.hidden.shape[1]
        pruning, budget = (
            (after[0].method.prefilling.pruning, after[0].token_budget) if after else (None, None)
        )
        if pruning is None or budget is None or budget >= through:
            return
        with self.backend.timed():
            going = self.backend.slots(pruning.prune_tokens(view, through, budget)).long()
        self.hidden = self.hidden[:, going.to(self.hidden.device)]
        self.rows = going if self.rows is None else self.rows[going]

    def logits(self) -> Tensor:
        """Next-token logits `(batch, vocab)` float32, after the last layer."""
        if self.cache.hidden is not None and self.rows is None:
            self.cache.hidden.write(self.end - self.hidden.shape[1], self.hidden)
        return self.model.logits(self.hidden[:, -1])

    def rewind(self) -> None:
        """Restore the cache and the host store; what was given up for memory stays given up."""
        if self.store is not None:
            self.store.rewind()
        for index, marks in self.marks.items():
            layer = self.cache.layers[index] = rewound(self.cache.layers[index], marks)
            self.cache.layers[index] = shrunk(layer, self.capacities[index], self.policies[index])

    def _safely(self, work: Callable[[], T]) -> T:
        """Do a part of the reading that can be done again."""
        if self.oom_policy is None:
            return work()
        return self.oom_policy.run(work, prefill_oom_actions(self))

    def _is_final(self, index: int) -> bool:
        return index == len(self.policies) - 1 and not self.whole

    def _roomy(self, index: int) -> LayerCache:
        """A layer with room for the new tokens: the cache's own, grown, if nothing of it will be
        dropped; else a copy, so that stopping loses nothing; or, with a host store, all that it
        ever read."""
        policy, layer = self.policies[index], self.cache.layers[index]
        self.marks.pop(index, None)
        if self.store is not None and self.store.begun:
            scored_by = policy.method.spec if policy.method.caches_scores else ""
            return self.store.restored(index, self.hidden.shape[1], layer.keys.device, scored_by)
        new = self.hidden.shape[1]
        if not grows(policy, layer, new):
            return roomy_copy(policy, layer, new, self.chunk)
        lengths = [(heads, used + new) for heads, used in layer.lengths]
        layer = layer.resized(policy.capacities(lengths, self.room), policy.method.decoding.rows)
        self.marks[index], self.cache.layers[index] = layer.mark(), layer
        return layer


@torch.inference_mode()
def prefill_in_slices(
    model: LoadedModel,
    cache: KVCache,
    token_ids: Tensor,
    policies: list[LayerPolicy],
    *,
    context: Tensor | None = None,
    store: HostKVStore | None = None,
    backend: ScoringBackend = ON_DEVICE,
    oom_policy: OOMPolicy | None = None,
    reserve: int = 0,
    chunk: int = CHUNK,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Slices[Tensor]:
    """Read `token_ids` into `cache`, compressing each layer as soon as it is done; may wait after
    every chunk of a layer. Closed before its end it leaves the cache as it was.

    Args:
        token_ids: `(batch, n)` int64, n >= 1, the tokens that follow what the cache has seen; or,
            with a host store that has begun, what that has seen. On any device, like `context`.
        policies: one a layer; a layer that its method leaves to another gets that one's here.
        context: `(batch, seen)` int64, the tokens before them; only methods that have the model
            repeat what it read, or look at its text, need it.
        store: takes everything that is read. Once it has, layers read on from there, not from the
            cache: reading is exact, and what is kept is chosen anew from all.
        backend: where attention becomes a choice of what is kept.
        oom_policy: what is given up where memory runs out; without it, that is an error.
        reserve: tokens of the answer that is planned for; caches that grow get room for up to
            `ROOM` at once.
        chunk: tokens that go through a layer together; any value gives the same result, unless the
            method looks at parts of what lies before a chunk.
        callbacks: who follows it; `notify` is not used.

    Returns:
        Logits of the next token, `(batch, vocab)` float32.

    Raises:
        Stopped: `callbacks.cancel` was set; the cache is as it was, as after any other exception.
        OutOfMemory: with an OOM policy, if nothing is left to give up.
    """
    beginning = cache_oom_actions(model, cache, policies, token_ids.shape[1]) | {
        HIDDEN: lambda: may_wait(model, oom_policy)
    }
    begin = partial(
        Prefill,
        model,
        cache,
        token_ids,
        policies,
        context=context,
        store=store,
        backend=backend,
        oom_policy=oom_policy,
        reserve=reserve,
        chunk=chunk,
        callbacks=callbacks,
    )
    run = begin() if oom_policy is None else oom_policy.run(begin, beginning)
    try:
        logits = yield from run.read()
        if store is not None:
            store.carry(run.states)
    except BaseException:
        run.rewind()
        raise
    cache.layers, cache.states = run.layers, run.states
    cache.seen, cache.writing = run.end, False
    if store is not None:
        store.read(run.end)
    cache.reconstructed = run.reconstructed
    return logits


prefill = whole(prefill_in_slices)
