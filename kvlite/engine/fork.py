"""Read a prompt once, compress it by many methods: what makes a grid of methods affordable.

A layer is cut only after its own attention, so most methods read alike; one reading serves all of
these, and each gets the cache it would have had alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlite.cache import KVBits, KVCache, LayerCache
from kvlite.cache.bits import written
from kvlite.engine.prefill import Reading, empty_cache, prefill
from kvlite.engine.watch import Watch
from kvlite.methods import Method
from kvlite.methods.base import LayerView, Rehearsal
from kvlite.methods.rules import ROOM, Rule, layer_rules, merge_below, share_out
from kvlite.model.load import LoadedModel


@dataclass(frozen=True)
class Choice:
    """One way to keep a prompt.

    Attributes:
        method: what chooses.
        budget: mean entries a KV head and layer.
        bits: how what is kept is quantized, if it is.
    """

    method: Method
    budget: int
    bits: KVBits | None = None

    @property
    def kv_bits(self) -> str:
        """As a user writes them."""
        return written(self.bits)


@dataclass
class Branch:
    """A choice's way on from a prompt.

    Attributes:
        choice: which.
        cache: what it kept.
        rules: one a layer.
        logits: of the next token, `(vocab,)` float32.
    """

    choice: Choice
    cache: KVCache
    rules: list[Rule]
    logits: Tensor


@torch.inference_mode()
def read_once(
    model: LoadedModel,
    token_ids: Sequence[int],
    choices: Sequence[Choice],
    *,
    reserve: int,
) -> list[Branch]:
    """Read a prompt for many methods: once for all whose reading is exact, once more for each
    way of repeating it, and again for each of the others.

    Args:
        choices: what each branch does.
        reserve: tokens that will be generated.

    Returns:
        A branch for each choice.
    """
    ids = torch.tensor([token_ids], device=model.device)
    outlook = next((each.method.outlook for each in choices if each.method.outlook), None)
    groups: dict[Rehearsal | None, list[int]] = {}
    branches: dict[int, Branch] = {}
    for index, choice in enumerate(choices):
        method = choice.method
        if method.exact and method.outlook in (None, outlook):
            cuts = choice.budget < len(token_ids)
            groups.setdefault(method.rehearsal if cuts else None, []).append(index)
        else:
            branches[index] = _alone(model, ids, choice, reserve)
    for rehearsal, group in groups.items():
        alike = [choices[index] for index in group]
        watch = Watch(1, outlook=outlook, rehearsal=rehearsal)
        branches |= zip(group, _shared(model, ids, alike, watch, reserve), strict=True)
    return [branches[index] for index in range(len(choices))]


def _alone(model: LoadedModel, ids: Tensor, choice: Choice, reserve: int) -> Branch:
    cache = empty_cache(model)
    rules = _rules(model, choice, ids.shape[1], cache)
    logits = prefill(model, cache, ids, rules, reserve=reserve)
    return Branch(choice, cache, rules, logits[0])


def _rules(model: LoadedModel, choice: Choice, count: int, cache: KVCache) -> list[Rule]:
    return layer_rules(
        choice.method, model.shape, choice.budget, count, cache.layers, bits=choice.bits
    )


def _shared(
    model: LoadedModel,
    ids: Tensor,
    choices: Sequence[Choice],
    watch: Watch,
    reserve: int,
) -> list[Branch]:
    shape, n, cache = model.shape, ids.shape[1], empty_cache(model)
    by_choice = [_rules(model, choice, n, cache) for choice in choices]
    rules = [rule for each in by_choice for rule in each]
    sums = any(rule.method.cumulative for rule in rules)
    watch = replace(watch, queries=max(map(_queries, rules)), sums=sums)
    watching = [Rule(watch, 0, window) for window in shape.windows]
    reading = Reading(model, cache, ids, watching)
    by_layer = [
        _cuts(reading.read_layer(index).view(index), by_choice, reserve)
        for index in range(shape.layers)
    ]
    caches = [KVCache(list(layers), n, reading.rehearsed) for layers in zip(*by_layer, strict=True)]
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
