"""Read a prompt once, compress it by many methods: what makes a grid of methods affordable.

A layer is cut only after its own attention, so most methods read alike; one reading serves all of
these, and each gets the cache it would have had alone.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlite.cache import KVBits, KVCache, LayerCache
from kvlite.cache.bits import written
from kvlite.engine.prefill import Prefill, prefill
from kvlite.engine.probe import Probe
from kvlite.methods import Method
from kvlite.methods.base import LayerView
from kvlite.methods.capabilities import Reconstruction
from kvlite.methods.layer_policy import ROOM, LayerPolicy, layer_policies, merge_below, share_out
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore, Recall

NO_RECALL = "off"


@dataclass(frozen=True)
class Recalled:
    """How what is dropped comes back.

    Attributes:
        entries: a KV head, that each token of an answer may look for; 0 recalls between turns only.
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
        method: what chooses.
        budget: mean entries a KV head and layer.
        bits: how what is kept is quantized, if it is.
        recall: how what is dropped comes back, if it does.
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
        """How what is dropped comes back, as tables name it."""
        return NO_RECALL if self.recall is None else str(self.recall)

    @property
    def read(self) -> "Choice":
        """What decides how a prompt is read: that which comes back later does not."""
        return replace(self, recall=self.recall and replace(self.recall, entries=0))


@dataclass
class Branch:
    """A choice's way on from a prompt.

    Attributes:
        choice: which.
        cache: what it kept.
        policies: one a layer.
        logits: of the next token, `(vocab,)` float32.
        store: everything that was read, if it recalls; other branches have the same.
    """

    choice: Choice
    cache: KVCache
    policies: list[LayerPolicy]
    logits: Tensor
    store: HostKVStore | None = None

    @property
    def recall(self) -> Recall | None:
        """What each token of its answer brings entries back from, if it does."""
        recall = self.choice.recall
        if self.store is None or recall is None or not recall.entries:
            return None
        return Recall(self.store, recall.entries)

    @property
    def index_bytes(self) -> int:
        """Bytes of the device that recall takes beside the cache."""
        return 0 if self.store is None else self.store.index_bytes

    @property
    def host_kv_bytes(self) -> int:
        """Bytes of host memory that it takes, without what other branches' methods found."""
        if self.store is None:
            return 0
        own = self.choice.method.caches_scores
        return self.store.nbytes - (0 if own else self.store.judged_bytes)


@torch.inference_mode()
def read_once(
    model: LoadedModel,
    token_ids: Sequence[int],
    choices: Sequence[Choice],
    *,
    reserve: int,
    store: HostKVStore | None = None,
    before: Sequence[int] = (),
) -> list[Branch]:
    """Read a prompt for many methods: once for all whose reading is exact, once more for each
    way of repeating it, and again for each of the others.

    Args:
        choices: what each branch does.
        reserve: tokens that will be generated.
        store: takes what is read, where any choice recalls; those that do must be a party
            (`recalling.parties`). Once it has begun they read on from there, and all must recall.
        before: the tokens that such a host store has read.

    Returns:
        A branch for each choice.
    """
    ids = torch.tensor([token_ids], device=model.device)
    past = _Past(model, torch.tensor([before], dtype=torch.int64, device=model.device), store)
    outlooks = (each.method.needs.outlook for each in choices)
    outlook = next((each for each in outlooks if each is not None), None)
    groups: dict[Reconstruction | None, list[Choice]] = {}
    read: dict[Choice, Branch] = {}
    for choice in dict.fromkeys(each.read for each in choices):
        method = choice.method
        if method.prefilling.exact and method.needs.outlook in (None, outlook):
            cuts = choice.recall is not None or choice.budget < len(before) + len(token_ids)
            groups.setdefault(method.prefilling.reconstruction if cuts else None, []).append(choice)
        else:
            read[choice] = _alone(model, ids, choice, past, reserve)
    for reconstruction, group in groups.items():
        probe = Probe(1, outlook=outlook, reconstruction=reconstruction)
        read |= zip(group, _shared(model, ids, group, past, probe, reserve), strict=True)
    return [_own(read[choice.read], choice, store) for choice in choices]


def _own(read: Branch, choice: Choice, store: HostKVStore | None) -> Branch:
    """A branch of its own, where several go on from one reading."""
    if choice.recall is None:
        return read
    return Branch(choice, deepcopy(read.cache), [*read.policies], read.logits, store)


@dataclass(frozen=True)
class _Past:
    """What is read on from.

    Attributes:
        before: `(1, n)` int64, what the host store has read.
        store: of those that recall.
    """

    model: LoadedModel
    before: Tensor
    store: HostKVStore | None

    def store_of(self, choices: Sequence[Choice]) -> HostKVStore | None:
        """What a reading for some choices is remembered in."""
        return self.store if any(choice.recall for choice in choices) else None

    def cache(self, reconstruction: Reconstruction | None) -> KVCache:
        """To read into: layers read on from the host store, whatever a cache still has of it."""
        cache, seen = self.model.empty_cache(), self.before.shape[1]
        cache.seen, cache.reconstructed = seen, seen if reconstruction else 0
        return cache

    def policies(self, choice: Choice, cache: KVCache, new: int) -> list[LayerPolicy]:
        """Of a choice, for `new` tokens; one that recalls has all there ever was to choose from."""
        held = None if choice.recall else cache.layers
        seen, shape = cache.seen + new, self.model.shape
        return layer_policies(choice.method, shape, choice.budget, seen, held, new, choice.bits)


def _alone(model: LoadedModel, ids: Tensor, choice: Choice, past: _Past, reserve: int) -> Branch:
    cache, store = past.cache(choice.method.prefilling.reconstruction), past.store_of([choice])
    policies = past.policies(choice, cache, ids.shape[1])
    logits = prefill(model, cache, ids, policies, context=past.before, store=store, reserve=reserve)
    return Branch(choice, cache, policies, logits[0])


def _shared(
    model: LoadedModel,
    ids: Tensor,
    choices: Sequence[Choice],
    past: _Past,
    probe: Probe,
    reserve: int,
) -> list[Branch]:
    shape, cache, store = model.shape, past.cache(probe.reconstruction), past.store_of(choices)
    by_choice = [past.policies(choice, cache, ids.shape[1]) for choice in choices]
    policies = [policy for each in by_choice for policy in each]
    sums = any(policy.method.decoding.cumulative for policy in policies)
    looking_on = max(map(_queries, policies))
    probe = replace(probe, queries=looking_on, sums=sums)
    # What a sliding window holds no method judges.
    watching = [
        LayerPolicy(probe if window is None else Probe(looking_on), 0, window)
        for window in shape.windows
    ]
    run = Prefill(model, cache, ids, watching, context=past.before, store=store, reserve=reserve)
    by_layer = []
    for index in range(shape.layers):
        reader = run.read_layer(index)
        run.remember(index, reader)
        by_layer.append(_cuts(reader.view(index), by_choice, reserve))
        del reader
    if store is not None:
        store.read(run.end)
    caches = [
        KVCache(list(layers), run.end, run.reconstructed) for layers in zip(*by_layer, strict=True)
    ]
    for each, own in zip(caches, by_choice, strict=True):
        for index in range(shape.layers):
            merge_below(each.layers, own, index, min(reserve, ROOM))
        share_out(each.layers, own, min(reserve, ROOM))
    logits = run.logits()[0]
    return [
        Branch(choice, each, own, logits)
        for choice, each, own in zip(choices, caches, by_choice, strict=True)
    ]


def _cuts(view: LayerView, branches: list[list[LayerPolicy]], reserve: int) -> list[LayerCache]:
    """What each branch's policy keeps of one layer."""
    cuts = []
    for policies in branches:
        policy = policies[view.layer]
        window = view.window.last(_queries(policy))
        shown = replace(view, window=window, budget=policy.budget)
        if policy.method.across.resolves_at == "read":
            policy = policies[view.layer] = policy.settled(shown)
        cuts.append(policy.cut(shown, min(reserve, ROOM)))
    return cuts


def _queries(policy: LayerPolicy) -> int:
    """How many of the last queries a policy wants to see, at least one."""
    return max(1, policy.method.needs.num_queries(policy.budget), policy.method.decoding.rows)
