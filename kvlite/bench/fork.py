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
from kvlite.engine.prefill import empty_cache, prefill
from kvlite.engine.probe import Watch
from kvlite.engine.reading import Reading
from kvlite.methods import Method
from kvlite.methods.base import LayerView, Rehearsal
from kvlite.methods.layer_policy import ROOM, Rule, layer_rules, merge_below, share_out
from kvlite.model.load import LoadedModel
from kvlite.offload import Recall, Tier

NO_RECALL = "off"


@dataclass(frozen=True)
class Recalled:
    """How what is dropped comes back.

    Attributes:
        entries: a KV head, that each token of an answer may look for; 0 recalls between turns only.
        bits: how the tier is quantized, if it is.
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
        rules: one a layer.
        logits: of the next token, `(vocab,)` float32.
        tier: everything that was read, if it recalls; other branches have the same.
    """

    choice: Choice
    cache: KVCache
    rules: list[Rule]
    logits: Tensor
    tier: Tier | None = None

    @property
    def recall(self) -> Recall | None:
        """What each token of its answer brings entries back from, if it does."""
        recall = self.choice.recall
        if self.tier is None or recall is None or not recall.entries:
            return None
        return Recall(self.tier, recall.entries)

    @property
    def index_bytes(self) -> int:
        """Bytes of the device that recall takes beside the cache."""
        return 0 if self.tier is None else self.tier.index_bytes

    @property
    def tier_bytes(self) -> int:
        """Bytes of host memory that it takes, without what other branches' methods found."""
        if self.tier is None:
            return 0
        own = self.choice.method.judges_once
        return self.tier.nbytes - (0 if own else self.tier.judged_bytes)


@torch.inference_mode()
def read_once(
    model: LoadedModel,
    token_ids: Sequence[int],
    choices: Sequence[Choice],
    *,
    reserve: int,
    tier: Tier | None = None,
    before: Sequence[int] = (),
) -> list[Branch]:
    """Read a prompt for many methods: once for all whose reading is exact, once more for each
    way of repeating it, and again for each of the others.

    Args:
        choices: what each branch does.
        reserve: tokens that will be generated.
        tier: takes what is read, where any choice recalls; those that do must be a party
            (`recalling.parties`). Once it has begun they read on from there, and all must recall.
        before: the tokens that such a tier has read.

    Returns:
        A branch for each choice.
    """
    ids = torch.tensor([token_ids], device=model.device)
    past = _Past(model, torch.tensor([before], dtype=torch.int64, device=model.device), tier)
    outlook = next((each.method.outlook for each in choices if each.method.outlook), None)
    groups: dict[Rehearsal | None, list[Choice]] = {}
    read: dict[Choice, Branch] = {}
    for choice in dict.fromkeys(each.read for each in choices):
        method = choice.method
        if method.exact and method.outlook in (None, outlook):
            cuts = choice.recall is not None or choice.budget < len(before) + len(token_ids)
            groups.setdefault(method.rehearsal if cuts else None, []).append(choice)
        else:
            read[choice] = _alone(model, ids, choice, past, reserve)
    for rehearsal, group in groups.items():
        watch = Watch(1, outlook=outlook, rehearsal=rehearsal)
        read |= zip(group, _shared(model, ids, group, past, watch, reserve), strict=True)
    return [_own(read[choice.read], choice, tier) for choice in choices]


def _own(read: Branch, choice: Choice, tier: Tier | None) -> Branch:
    """A branch of its own, where several go on from one reading."""
    if choice.recall is None:
        return read
    return Branch(choice, deepcopy(read.cache), [*read.rules], read.logits, tier)


@dataclass(frozen=True)
class _Past:
    """What is read on from.

    Attributes:
        before: `(1, n)` int64, what the tier has read.
        tier: of those that recall.
    """

    model: LoadedModel
    before: Tensor
    tier: Tier | None

    def tier_of(self, choices: Sequence[Choice]) -> Tier | None:
        """What a reading for some choices is remembered in."""
        return self.tier if any(choice.recall for choice in choices) else None

    def cache(self, rehearsal: Rehearsal | None) -> KVCache:
        """To read into: layers read on from the tier, whatever a cache still has of it."""
        cache, seen = empty_cache(self.model), self.before.shape[1]
        cache.seen, cache.rehearsed = seen, seen if rehearsal else 0
        return cache

    def rules(self, choice: Choice, cache: KVCache, new: int) -> list[Rule]:
        """Of a choice, for `new` tokens; one that recalls has all there ever was to choose from."""
        held = None if choice.recall else cache.layers
        seen, shape = cache.seen + new, self.model.shape
        return layer_rules(choice.method, shape, choice.budget, seen, held, new, choice.bits)


def _alone(model: LoadedModel, ids: Tensor, choice: Choice, past: _Past, reserve: int) -> Branch:
    cache, tier = past.cache(choice.method.rehearsal), past.tier_of([choice])
    rules = past.rules(choice, cache, ids.shape[1])
    logits = prefill(model, cache, ids, rules, context=past.before, tier=tier, reserve=reserve)
    return Branch(choice, cache, rules, logits[0])


def _shared(
    model: LoadedModel,
    ids: Tensor,
    choices: Sequence[Choice],
    past: _Past,
    watch: Watch,
    reserve: int,
) -> list[Branch]:
    shape, cache, tier = model.shape, past.cache(watch.rehearsal), past.tier_of(choices)
    by_choice = [past.rules(choice, cache, ids.shape[1]) for choice in choices]
    rules = [rule for each in by_choice for rule in each]
    sums, looking_on = any(rule.method.cumulative for rule in rules), max(map(_queries, rules))
    watch = replace(watch, queries=looking_on, sums=sums)
    # What a sliding window holds no method judges.
    watching = [
        Rule(watch if window is None else Watch(looking_on), 0, window) for window in shape.windows
    ]
    reading = Reading(model, cache, ids, watching, context=past.before, tier=tier, reserve=reserve)
    by_layer = []
    for index in range(shape.layers):
        reader = reading.read_layer(index)
        reading.remember(index, reader)
        by_layer.append(_cuts(reader.view(index), by_choice, reserve))
        del reader
    if tier is not None:
        tier.read(reading.end)
    caches = [
        KVCache(list(layers), reading.end, reading.rehearsed)
        for layers in zip(*by_layer, strict=True)
    ]
    for each, own in zip(caches, by_choice, strict=True):
        for index in range(shape.layers):
            merge_below(each.layers, own, index, min(reserve, ROOM))
        share_out(each.layers, own, min(reserve, ROOM))
    logits = reading.logits()[0]
    return [
        Branch(choice, each, own, logits)
        for choice, each, own in zip(choices, caches, by_choice, strict=True)
    ]


def _cuts(view: LayerView, branches: list[list[Rule]], reserve: int) -> list[LayerCache]:
    """What each branch's rule keeps of one layer."""
    cuts = []
    for rules in branches:
        rule = rules[view.layer]
        window = view.window.last(_queries(rule))
        shown = replace(view, window=window, budget=rule.budget)
        if rule.method.settles == "read":
            rule = rules[view.layer] = rule.settled(shown)
        cuts.append(rule.cut(shown, min(reserve, ROOM)))
    return cuts


def _queries(rule: Rule) -> int:
    """How many of the last queries a rule wants to see, at least one."""
    return max(1, rule.method.observation(rule.budget), rule.method.decode_rows)
