"""Answering: one token a step through all layers, written in place."""

import functools

import torch
from torch import Tensor

from kvlite.attention import attend, attend_with_rows, grouped
from kvlite.cache import Bank, KVCache, LayerCache, Selection
from kvlite.engine.fronts import attend_front
from kvlite.engine.heads import over_banks
from kvlite.engine.sight import Sight, sights
from kvlite.methods.base import LayerView
from kvlite.methods.rules import ROOM, Rule
from kvlite.methods.scores import Window
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation
from kvlite.offload import Recall


class LayerStep:
    """Runs one layer over one new token a sequence."""

    def __init__(
        self,
        index: int,
        layer: LayerCache,
        rule: Rule,
        position: int,
        rotation: Rotation,
        sight: Sight | None = None,
        recall: Recall | None = None,
    ) -> None:
        self.index = index
        self.layer = layer
        self.rule = rule
        self.position = position
        self.rotation = rotation
        self.sight = sight
        self.recall = recall
        self.positions = torch.full((1,), position, dtype=torch.int32, device=layer.keys.device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Write the token into every bank, then attend over all of it."""
        if not all(bank.room for bank in self.layer.banks):
            self._grow()
        recall = self.recall
        if recall is not None:
            recall.tier.answer(self.index, k, v, self.position)

        @functools.cache
        def scores() -> Tensor:
            assert recall is not None
            return recall.scores(self.index, _queries(q, k.shape[1], scale))

        def over(bank: Bank, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(bank, k, v)
            if recall is not None and recall.reaches(self.index, bank):
                queries = _queries(q, len(bank.heads), scale)
                recall.bring_back(self.index, bank, queries, scores())
            if bank.front is not None and self.sight is None:
                return self._over_front(bank, q, scale, softcap)
            keys, values = bank.keys[:, :, : bank.used], bank.values[:, :, : bank.used]
            if self.sight is not None:
                own = self.rotation
                return self.sight.attend(q, keys, values, self.position, own, scale, softcap)
            if not self._remembers(bank):
                return attend(q, keys, values, scale=scale, softcap=softcap, causal=False)[0]
            out, rows = attend_with_rows(q, keys, values, scale=scale, softcap=softcap)
            self._remember(bank, rows[:, :, 0])
            return out

        out = over_banks(self.layer, q, k, v, over)
        if self.rule.method.settles == "step":
            self._settle(Window(q, self.position, k.shape[1], scale, softcap))
        return out

    def _over_front(self, bank: Bank, q: Tensor, scale: float, softcap: float | None) -> Tensor:
        remembers = self._remembers(bank)
        out, row = attend_front(q, bank, scale=scale, softcap=softcap, remembers=remembers)
        if remembers and row is not None:
            self._remember(bank, row)
        return out

    def _remembers(self, bank: Bank) -> bool:
        """Whether the method judges entries by the attention they get while answering."""
        return bank.rows is not None and self.rule.method.rehearsal is None

    def _remember(self, bank: Bank, row: Tensor) -> None:
        (bank.add if self.rule.method.cumulative else bank.record)(row)

    def _settle(self, window: Window) -> None:
        """Let the method look at the layer, and cut what it now keeps less of."""
        view = LayerView(
            self.index, self.layer.banks, window, self.rule.budget, like=self.layer.like
        )
        self.rule = self.rule.settled(view)
        if self.rule.packs is not None or not self.rule.keeps_all(view.lines):
            self.layer = self.rule.cut(view, ROOM)

    def _grow(self) -> None:
        """Take more storage, where the rule lets a full line grow."""
        sizes = self.rule.capacities(self.layer.lines)
        if any(size > bank.capacity for size, bank in zip(sizes, self.layer.banks, strict=True)):
            rows, bits = self.rule.method.decode_rows, self.rule.packs
            self.layer = self.layer.resized(sizes, rows, bits)

    def _write(self, bank: Bank, k: Tensor, v: Tensor) -> None:
        if bank.room:
            bank.append(k, v, self.positions)
        else:
            slots = self.rule.method.evict(bank, self.rule.budget, self.position)
            bank.overwrite(slots, k, v, self.position)

    def trimmed(self) -> LayerCache:
        """The layer after the step: smaller, in storage of its own, if the method cuts it now."""
        method, banks = self.rule.method, self.layer.banks
        if not method.trims:
            return self.layer
        kept = [method.trim(bank, self.rule.budget) for bank in banks]
        if all(slots is None for slots in kept):
            return self.layer
        selections = [
            Selection.everything(bank) if slots is None else Selection(bank, slots)
            for bank, slots in zip(banks, kept, strict=True)
        ]
        sizes = self.rule.capacities([each.line for each in selections])
        like = self.layer.like
        rows, bits = method.decode_rows, self.rule.packs
        return LayerCache.gathered(selections, sizes, rows, like=like, bits=bits)


def _queries(q: Tensor, kv_heads: int, scale: float) -> Tensor:
    """One token's queries by KV head, `(batch, kv heads, rows, dim)` float32, scaled."""
    return grouped(q, kv_heads)[:, :, :, 0].float() * scale


@torch.inference_mode()
def decode_step(
    model: LoadedModel,
    cache: KVCache,
    token_ids: Tensor,
    rules: list[Rule],
    recall: Recall | None = None,
) -> Tensor:
    """Put one token a sequence through the model.

    Args:
        token_ids: `(batch,)` int64.
        rules: one a layer; where a method settles at the first step, that is put here.
        recall: takes the token too, and brings back what it wants.

    Returns:
        Logits of the next token, `(batch, vocab)` float32.
    """
    cache.require_whole()
    cache.writing = True
    hidden = model.embed(token_ids[:, None])
    rotations, seeing = model.rotations(cache.seen, 1), sights(model, rules)
    for index, (module, rule) in enumerate(zip(model.layers, rules, strict=True)):
        layer, sight = cache.layers[index], seeing[index]
        step = LayerStep(index, layer, rule, cache.seen, rotations[index], sight, recall)
        hidden = module(hidden, position_embeddings=rotations[index], kvlite=step)
        cache.layers[index] = step.trimmed()
        rules[index] = step.rule
    logits = model.logits(hidden[:, -1])
    cache.seen += 1
    cache.writing = False
    return logits
