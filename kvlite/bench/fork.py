"""Read a prompt once, compress it by many methods: what makes a grid of methods affordable.

Reading is exact whatever the method, since a layer is cut only after its own attention; so one
reading serves all of them, and each gets the cache it would have had alone.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache, Selection
from kvlite.engine.prefill import cut, prefill
from kvlite.methods import Method
from kvlite.methods.base import LayerView
from kvlite.methods.rules import Rule, layer_rules
from kvlite.model.load import LoadedModel


@dataclass(frozen=True)
class _Fork(Method):
    """Keeps everything, and lets every branch cut its own copy first."""

    name: ClassVar[str] = "fork"
    summary: ClassVar[str] = "measures other methods"
    paper: ClassVar[str] = "none"

    branches: tuple[list[Rule], ...]
    layers: tuple[list[LayerCache], ...] = field(repr=False)
    room: int

    def observation(self, budget: int) -> int:
        """What the hungriest branch wants."""
        rules = [rule for branch in self.branches for rule in branch]
        return max(max(r.method.observation(r.budget), r.method.decode_rows) for r in rules)

    def budgets(self, layers: int, average: int, seen: int) -> list[int]:
        """Too little for anything, so that every layer is shown to `select`."""
        return [0] * layers

    def select(self, view: LayerView) -> list[Selection]:
        """Cut once a branch; keep nothing itself."""
        for rules, layers in zip(self.branches, self.layers, strict=True):
            rule = rules[view.layer]
            window = view.window.last(
                max(rule.method.observation(rule.budget), rule.method.decode_rows)
            )
            shown = LayerView(view.layer, view.banks, window, rule.budget)
            if max(bank.used for bank in view.banks) > rule.budget:
                layers.append(cut(shown, rule, self.room))
            else:
                layers.append(cut(shown, Rule(_KeepAll(rule.method), rule.budget), self.room))
        return [Selection(bank, bank.positions[..., :0].long()) for bank in view.banks]


@dataclass(frozen=True)
class _KeepAll(Method):
    """A branch whose budget holds everything."""

    name: ClassVar[str] = "keep-all"
    summary: ClassVar[str] = "keeps a layer that fits its budget"
    paper: ClassVar[str] = "none"

    method: Method

    @property
    def decode_rows(self) -> int:
        """As the branch's method."""
        return self.method.decode_rows

    @property
    def bounded(self) -> bool:
        """As the branch's method."""
        return self.method.bounded

    def select(self, view: LayerView) -> list[Selection]:
        """Every slot."""
        return [
            Selection(bank, bank.positions[:, :, : bank.used].argsort(-1)) for bank in view.banks
        ]


def read_once(
    model: LoadedModel,
    token_ids: list[int],
    choices: list[tuple[Method, int]],
    *,
    reserve: int,
) -> tuple[Tensor, list[tuple[KVCache, list[Rule]]], list[tuple[Tensor, Tensor]]]:
    """Read a prompt once for many methods.

    Args:
        choices: method and mean budget of each branch.
        reserve: tokens that will be generated.

    Returns:
        Logits after the prompt `(1, vocab)`; a cache and its rules for each choice; rotations
        of prompt and answer.
    """
    shape, n = model.shape, len(token_ids)
    branches = tuple(layer_rules(method, shape, budget, n) for method, budget in choices)
    layers: tuple[list[LayerCache], ...] = tuple([] for _ in choices)
    fork = _Fork(branches, layers, reserve)
    rules = [Rule(fork, 0, window) for window in shape.windows]
    rotations = model.rotations(0, n + reserve)
    cache = KVCache.empty(
        shape.layers, shape.kv_heads, shape.head_dim, dtype=model.dtype, device=model.device
    )
    ids = torch.tensor([token_ids], device=model.device)
    logits = prefill(model, cache, ids, rules, rotations)
    caches = [KVCache(kept, seen=n) for kept in layers]
    return logits, list(zip(caches, branches, strict=True)), rotations
