"""Read a prompt once, compress it by many methods: what makes a grid of methods affordable.

A layer is cut only after its own attention, so most methods read alike; one reading serves all of
these, and each gets the cache it would have had alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache
from kvlite.engine.prefill import Reading, empty_cache, prefill
from kvlite.engine.watch import Watch
from kvlite.methods import Method
from kvlite.methods.base import LayerView, Rehearsal
from kvlite.methods.rules import ROOM, Rule, layer_rules, merge_below, share_out
from kvlite.model.load import LoadedModel


@dataclass
class Branch:
    """One method's way on from a prompt.

    Attributes:
        method, budget: as chosen.
        cache: what it kept.
        rules: one a layer.
        logits: of the next token, `(vocab,)` float32.
    """

    method: Method
    budget: int
    cache: KVCache
    rules: list[Rule]
    logits: Tensor


@torch.inference_mode()
def read_once(
    model: LoadedModel,
    token_ids: Sequence[int],
    choices: Sequence[tuple[Method, int]],
    *,
    reserve: int,
) -> list[Branch]:
    """Read a prompt for many methods: once for all whose reading is exact, once more for each
    way of repeating it, and again for each of the others.

    Args:
        choices: method and mean budget of each branch.
        reserve: tokens that will be generated.

    Returns:
        A branch for each choice.
    """
    ids = torch.tensor([token_ids], device=model.device)
    outlook = next((method.outlook for method, _ in choices if method.outlook), None)
    groups: dict[Rehearsal | None, list[int]] = {}
    branches: dict[int, Branch] = {}
    for index, (method, budget) in enumerate(choices):
        if method.exact and method.outlook in (None, outlook):
            cuts = budget < len(token_ids)
            groups.setdefault(method.rehearsal if cuts else None, []).append(index)
        else:
            branches[index] = _alone(model, ids, method, budget, reserve)
    for rehearsal, group in groups.items():
        alike = [choices[index] for index in group]
        watch = Watch(1, outlook=outlook, rehearsal=rehearsal)
        branches |= zip(group, _shared(model, ids, alike, watch, reserve), strict=True)
    return [branches[index] for index in range(len(choices))]


def _alone(model: LoadedModel, ids: Tensor, method: Method, budget: int, reserve: int) -> Branch:
    cache = empty_cache(model)
    rules = layer_rules(method, model.shape, budget, ids.shape[1], cache.layers)
    logits = prefill(model, cache, ids, rules, reserve=reserve)
    return Branch(method, budget, cache, rules, logits[0])


def _shared(
    model: LoadedModel,
    ids: Tensor,
    choices: Sequence[tuple[Method, int]],
    watch: Watch,
    reserve: int,
) -> list[Branch]:
    shape, n, cache = model.shape, ids.shape[1], empty_cache(model)
    by_choice = [layer_rules(method, shape, budget, n, cache.layers) for method, budget in choices]
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
        Branch(method, budget, each, own, logits)
        for (method, budget), each, own in zip(choices, caches, by_choice, strict=True)
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
