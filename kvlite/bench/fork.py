"""Read a prompt once, compress it by many methods: what makes a grid of methods affordable.

A layer is cut only after its own attention, so most methods read alike; one reading serves all of
these, and each gets the cache it would have had alone.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlite.bench.options import NO_RECALL
from kvlite.cache import KVBits, KVCache, LayerCache
from kvlite.cache.bits import written
from kvlite.engine.prefill import Prefill, prefill
from kvlite.engine.probe import Probe, probing
from kvlite.engine.slices import in_one_go
from kvlite.methods import Method
from kvlite.methods.base import LayerView
from kvlite.methods.capabilities import Reconstruction
from kvlite.methods.layer_policy import (
    ROOM,
    LayerPolicy,
    layer_policies,
    loses,
    merge_below,
    share_out,
)
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore, Recall


@dataclass(frozen=True)
class Recalled:
    """How what was dropped is recalled.

    Attributes:
        entries: how many each token of an answer may look for, a KV head; 0 recalls between turns
            only.
        bits: how the host store is quantized, if it is.
    """

    entries: int
    bits: KVBits | None = None

    def __str__(self) -> str:
        """As tables name it."""
        return f"{self.entries}" if self.bits is None else f"{self.entries} of {self.bits} bits"


@dataclass(frozen=True)
class Choice:
    """One way to keep a prompt.

    Attributes:
        budget: mean entries a KV head and layer.
        bits: how what is kept is quantized, if it is.
    """

    method: Method
    budget: int
    bits: KVBits | None = None
    recall: Recalled | None = None

    @property
    def kv_bits(self) -> str:
        """As a user writes them."""
        return written(self.bits)

    @property
    def recalls(self) -> str:
        """The recall, as tables name it."""
        return NO_RECALL if self.recall is None else str(self.recall)

    @property
    def is_full(self) -> bool:
        """Whether everything is kept as it was read: what others are compared with."""
        return self.method.name == "full" and self.bits is None

    @property
    def columns(self) -> dict[str, Any]:
        """Which choice it is, as rows name it."""
        return {
            "method": self.method.spec,
            "budget": self.budget,
            "kv_bits": self.kv_bits,
            "recall": self.recalls,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """As a user would set it."""
        own = {"method": self.method.spec, "budget": str(self.budget), "kv_bits": self.kv_bits}
        if self.recall is None:
            return {**own, "recall": "off"}
        bits = written(self.recall.bits)
        return {**own, "recall": "ram", "recall_entries": self.recall.entries, "recall_bits": bits}

    @property
    def read(self) -> "Choice":
        """The choice as far as it decides how a prompt is read: recalled entries do not."""
        return replace(self, recall=self.recall and replace(self.recall, entries=0))


@dataclass
class Branch:
    """A prompt as one choice has kept it.

    Attributes:
        policies: one a layer.
        logits: of the next token, `(vocab,)` float32.
        store: everything that was read, if it recalls; shared with other branches.
    """

    choice: Choice
    cache: KVCache
    policies: list[LayerPolicy]
    logits: Tensor
    store: HostKVStore | None = None

    @property
    def recall(self) -> Recall | None:
        """Where each token of its answer recalls entries from, if it does."""
        recall = self.choice.recall
        if self.store is None or recall is None or not recall.entries:
            return None
        return Recall(self.store, recall.entries)

    @property
    def index_bytes(self) -> int:
        """Bytes on the device that recall takes besides the cache."""
        return 0 if self.store is None else self.store.index_bytes

    @property
    def host_kv_bytes(self) -> int:
        """Bytes of host memory that recall takes, without the scores of other branches' methods."""
        if self.store is None:
            return 0
        own = self.choice.method.caches_scores
        return self.store.nbytes - (0 if own else self.store.cached_score_bytes)

    @property
    def columns(self) -> dict[str, Any]:
        """Which choice it is, and what it holds, as rows name it."""
        return {
            **self.choice.columns,
            "entries_mean": self.cache.entries_mean,
            "kv_bytes": self.cache.nbytes,
            "index_bytes": self.index_bytes,
            "host_kv_bytes": self.host_kv_bytes,
        }

    def copy(self, **changes: Any) -> "Branch":
        """One that can go on by itself."""
        cache, policies = deepcopy(self.cache), [*self.policies]
        return replace(self, cache=cache, policies=policies, **changes)


def parties(choices: Sequence[Choice]) -> list[list[Choice]]:
    """Choices in groups that need one host store each. A host store holds all that was read, so
    there should never be two at a time. Choices without recall are in the first group, beside
    recall with the same bits."""
    bits = next((each.recall.bits for each in choices if each.recall), None)
    plain: tuple[Any, ...] = (bits, None, None)
    groups: dict[tuple[Any, ...], list[Choice]] = {plain: []}
    for choice in choices:
        method, recall = choice.method, choice.recall
        key = plain
        if recall is not None:
            alone = None if method.prefilling.exact else choice.read
            key = (recall.bits, method.prefilling.reconstruction, alone)
        groups.setdefault(key, []).append(choice)
    return [group for group in groups.values() if group]


def read_turns(
    model: LoadedModel,
    turns: Sequence[Sequence[int]],
    choices: Sequence[Choice],
    *,
    reserve: int,
) -> list[Branch]:
    """Read tokens turn by turn; only the last turn will be answered.

    Args:
        choices: that need one host store at most (see `parties`).
        reserve: tokens that will be generated.

    Returns:
        A branch for each choice, with the cache that a conversation would have.
    """
    seen = sum(map(len, turns))
    # A choice that drops nothing has nothing to recall, as in a conversation.
    own = [
        choice
        if loses(choice.method, choice.budget, seen, reserve, choice.bits)
        else replace(choice, recall=None)
        for choice in choices
    ]
    recalling = [each for each in own if each.recall]
    store = None
    if recalling:
        (bits,) = {each.recall.bits for each in recalling if each.recall}
        store = HostKVStore.empty(model.shape, model.dtype, bits)
    before: list[int] = []
    branches: list[Branch] = []
    for at, turn in enumerate(turns, 1):
        room = reserve if at == len(turns) else 0
        reading = _Reading(model, turn, before, room, store)
        if not before:
            branches = reading.branches(own)
        else:
            recalled = iter(reading.branches(recalling))
            branches = [
                next(recalled) if each.choice.recall else reading.alone(each.choice, each.cache)
                for each in branches
            ]
        before += turn
    return [
        replace(branch, choice=choice) for branch, choice in zip(branches, choices, strict=True)
    ]


class _Reading:
    """Tokens to read, after those of earlier turns.

    Choices that recall read on from the host store, whatever a cache still has of those.
    """

    def __init__(
        self,
        model: LoadedModel,
        token_ids: Sequence[int],
        before: Sequence[int],
        reserve: int,
        store: HostKVStore | None,
    ) -> None:
        self.model = model
        self.ids = torch.tensor([token_ids], device=model.device)
        self.before = torch.tensor([before], dtype=torch.int64, device=model.device)
        self.reserve = reserve
        self.store = store

    @torch.inference_mode()
    def branches(self, choices: Sequence[Choice]) -> list[Branch]:
        """One for each choice: read once for all whose reading is exact, once more for each way of
        reconstruction, and again for each of the others. In later turns, all of them recall."""
        seen = self.before.shape[1] + self.ids.shape[1]
        groups: dict[Reconstruction | None, list[Choice]] = {}
        read: dict[Choice, Branch] = {}
        for choice in dict.fromkeys(each.read for each in choices):
            method = choice.method
            reconstruction = method.prefilling.reconstruction
            if method.prefilling.exact:
                cuts = choice.recall is not None or choice.budget < seen
                groups.setdefault(reconstruction if cuts else None, []).append(choice)
            else:
                read[choice] = self.alone(choice, self._empty(reconstruction))
        for reconstruction, group in groups.items():
            probe = Probe(1, reconstruction=reconstruction)
            read |= zip(group, self._shared(group, probe), strict=True)
        own: list[Branch] = []
        for choice in choices:
            branch = read[choice.read]
            if choice.recall:
                branch = branch.copy(choice=choice, store=self.store)
            elif any(branch is each for each in own):
                branch = branch.copy()
            own.append(branch)
        return own

    def _store_of(self, choices: Sequence[Choice]) -> HostKVStore | None:
        return self.store if any(choice.recall for choice in choices) else None

    def _empty(self, reconstruction: Reconstruction | None) -> KVCache:
        cache, seen = self.model.empty_cache(), self.before.shape[1]
        cache.seen, cache.reconstructed = seen, seen if reconstruction else 0
        return cache

    def _policies(self, choice: Choice, cache: KVCache) -> list[LayerPolicy]:
        """One a layer; a choice that recalls has all there ever was to choose from."""
        held = None if choice.recall else cache.layers
        new, shape = self.ids.shape[1], self.model.shape
        seen = cache.seen + new
        return layer_policies(choice.method, shape, choice.budget, seen, held, new, choice.bits)

    def alone(self, choice: Choice, cache: KVCache) -> Branch:
        policies = self._policies(choice, cache)
        logits = prefill(
            self.model,
            cache,
            self.ids,
            policies,
            context=self.before,
            store=self._store_of([choice]),
            reserve=self.reserve,
        )
        return Branch(choice, cache, policies, logits[0])

    def _shared(self, choices: Sequence[Choice], probe: Probe) -> list[Branch]:
        """Read once: every layer is cut for each choice before the next is read."""
        shape, cache = self.model.shape, self._empty(probe.reconstruction)
        store = self._store_of(choices)
        by_choice = [self._policies(choice, cache) for choice in choices]
        policies = [policy for each in by_choice for policy in each]
        sums = any(policy.method.decoding.cumulative for policy in policies)
        queries = max(map(_queries, policies))
        first = max(policy.method.needs.first for policy in policies)
        text = any(policy.method.needs_text for policy in policies)
        probe = replace(probe, queries=queries, first=first, text=text, sums=sums)
        watching = probing(shape, probe)
        run = Prefill(
            self.model,
            cache,
            self.ids,
            watching,
            context=self.before,
            store=store,
            reserve=self.reserve,
        )
        room = min(self.reserve, ROOM)
        by_layer = []
        for index in range(shape.layers):
            reader = in_one_go(run.read_layer(index))
            run.remember(index, reader)
            by_layer.append(_cuts(reader.view(index), by_choice, room))
            del reader
        if store is not None:
            store.carry(run.states)
            store.read(run.end)
        logits = run.logits()[0]
        branches = []
        for choice, own, layers in zip(
            choices, by_choice, zip(*by_layer, strict=True), strict=True
        ):
            kept = KVCache(list(layers), run.end, run.reconstructed, states={**run.states})
            for index in range(shape.layers):
                merge_below(kept.layers, own, index, room)
            share_out(kept.layers, own, room)
            branches.append(Branch(choice, kept, own, logits))
        return branches


def _cuts(view: LayerView, branches: list[list[LayerPolicy]], room: int) -> list[LayerCache]:
    cuts = []
    for policies in branches:
        policy = policies[view.layer]
        window = view.window.last(_queries(policy))
        first = policy.method.needs.first
        opening = view.opening.first(first) if view.opening is not None and first else None
        shown = replace(view, window=window, opening=opening, budget=policy.budget)
        if policy.method.across.resolves_at == "read":
            policy = policies[view.layer] = policy.settled(shown)
        cuts.append(policy.cut(shown, room))
    return cuts


def _queries(policy: LayerPolicy) -> int:
    return max(1, policy.method.needs.num_queries(policy.budget), policy.method.decoding.rows)
