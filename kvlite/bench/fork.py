"""Read a prompt once, compress it by many methods: what makes a grid of methods affordable.

Reading is exact whatever the method, since a layer is cut only after its own attention; so one
reading serves all of them, and each gets the cache it would have had alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache, Selection
from kvlite.engine.prefill import Reading
from kvlite.methods import Method
from kvlite.methods.base import LayerView
from kvlite.methods.rules import ROOM, Rule, layer_rules, share_out
from kvlite.model.load import LoadedModel


@dataclass(frozen=True)
class Watch(Method):
    """Looks on with as many queries as the hungriest of the methods wants."""

    name: ClassVar[str] = "watch"
    summary: ClassVar[str] = "measures other methods"
    paper: ClassVar[str] = "none"

    queries: int
    sums: bool

    @property
    def cumulative(self) -> bool:
        """Where one of them is."""
        return self.sums

    @property
    def decode_rows(self) -> int:
        """The sum's."""
        return int(self.sums)

    def observation(self, budget: int) -> int:
        """What was asked for."""
        return self.queries

    def select(self, view: LayerView) -> list[Selection]:
        """Never called: the branches cut."""
        raise AssertionError("watch does not select")


@torch.inference_mode()
def read_once(
    model: LoadedModel,
    token_ids: list[int],
    choices: Sequence[tuple[Method, int]],
    *,
    reserve: int,
) -> tuple[Tensor, list[tuple[KVCache, list[Rule]]]]:
    """Read a prompt once for many methods.

    Args:
        choices: method and mean budget of each branch.
        reserve: tokens that will be generated.

    Returns:
        Logits after the prompt `(1, vocab)`; a cache and its rules for each choice.
    """
    shape, n = model.shape, len(token_ids)
    held = [n] * shape.layers
    branches = [layer_rules(method, shape, budget, n, held) for method, budget in choices]
    rules = [rule for branch in branches for rule in branch]
    watch = Watch(max(map(_queries, rules)), any(rule.method.cumulative for rule in rules))
    cache = KVCache.empty(
        shape.layers, shape.kv_heads, shape.head_dim, dtype=model.dtype, device=model.device
    )
    ids = torch.tensor([token_ids], device=model.device)
    reading = Reading(model, cache, ids, [Rule(watch, 0, window) for window in shape.windows])
    by_layer = [
        _cuts(reading.read_layer(index).view(index), branches, reserve)
        for index in range(shape.layers)
    ]
    caches = [KVCache(list(layers), seen=n) for layers in zip(*by_layer, strict=True)]
    for each, branch in zip(caches, branches, strict=True):
        share_out(each.layers, branch, min(reserve, ROOM))
    return reading.logits(), list(zip(caches, branches, strict=True))


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
