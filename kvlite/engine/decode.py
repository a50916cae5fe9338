"""Answering: one token a step through all layers, written in place."""

import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvlite.cache import Bank, KVCache, LayerCache, Selection
from kvlite.engine.heads import over_banks
from kvlite.engine.oom_actions import cache_offers
from kvlite.engine.quantized_attention import attend_front
from kvlite.engine.sparse_attention import Sight, sights
from kvlite.memory.oom import Ladder, T
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import ROOM, Rule
from kvlite.methods.scores import Window
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation
from kvlite.offload import Recall
from kvlite.ops.attention import attend, attend_with_rows, grouped


class LayerStep:
    """Runs one layer over one new token a sequence.

    Where memory runs out, the layer is simply run again: what was done for good is known, and is
    not done twice.

    Attributes:
        layer, rule: as they stand.
        done: what was, by KV heads of a bank.
        asked: what the method is to settle by, once all of the layer went through.
    """

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
        self.done: set[tuple[str, tuple[int, ...]]] = set()
        self.asked: Window | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Write the token into every bank, then attend over all of it."""
        if not self.done and not all(bank.room for bank in self.layer.banks):
            self._grow()
        recall = self.recall
        if recall is not None:
            add = partial(recall.tier.answer, self.index, k, v, self.position)
            self._once("told", tuple(range(k.shape[1])), add)

        @functools.cache
        def scores() -> Tensor:
            assert recall is not None
            return recall.scores(self.index, _queries(q, k.shape[1], scale))

        def over(bank: Bank, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._once("written", bank.heads, partial(self._write, bank, k, v))
            if recall is not None and recall.reaches(self.index, bank):
                queries = _queries(q, len(bank.heads), scale)
                come = partial(recall.bring_back, self.index, bank, queries)
                self._once("recalled", bank.heads, lambda: come(scores()))
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
            self.asked = Window(q, self.position, k.shape[1], scale, softcap)
        return out

    def _once(self, what: str, heads: tuple[int, ...], act: Callable[[], None]) -> None:
        """Do something that allocates all it needs before it changes anything, unless it was."""
        if (what, heads) not in self.done:
            act()
            self.done.add((what, heads))

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
        add = bank.add if self.rule.method.cumulative else bank.record
        self._once("judged", bank.heads, partial(add, row))

    def _settle(self, window: Window) -> None:
        """Let the method look at the layer, and cut what it now keeps less of."""
        layer = self.layer
        view = LayerView(self.index, layer.banks, window, self.rule.budget, like=layer.like)
        rule = self.rule.settled(view)
        if rule.packs is not None or not rule.keeps_all(view.lines):
            layer = rule.cut(view, ROOM)
        self.rule, self.layer, self.asked = rule, layer, None

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
        if self.asked is not None:
            self._settle(self.asked)
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


class Step:
    """One token a sequence on its way through the layers. Where memory runs out, and something can
    be given up, it goes on from the last layer it got through; else it can be run again, later.

    Attributes:
        hidden: `(batch, 1, hidden size)`, what comes into the next layer.
        index: that layer.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        token_ids: Tensor,
        rules: list[Rule],
        recall: Recall | None = None,
        ladder: Ladder | None = None,
    ) -> None:
        """As in `decode_step`."""
        cache.require_whole()
        self.model = model
        self.cache = cache
        self.rules = rules
        self.recall = recall
        self.ladder = ladder
        self.offers = cache_offers(model, cache, rules)
        self.index = 0
        self.hidden = model.embed(token_ids[:, None])
        self.rotations = model.rotations(cache.seen, 1)
        self.sights = sights(model, rules)
        self.step: LayerStep | None = None
        self.through: Tensor | None = None

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Go through the layers that are left; logits of the next token.

        Raises:
            OutOfMemory: with a ladder, if nothing is left to give up; the step can be run again.
        """
        self.cache.writing = True
        while self.index < len(self.rules):
            self._safely(self._layer)
        logits = self._safely(lambda: self.model.logits(self.hidden[:, -1]))
        self.cache.seen += 1
        self.cache.writing = False
        return logits

    def _safely(self, work: Callable[[], T]) -> T:
        """Do a part of the step that can be done again."""
        return work() if self.ladder is None else self.ladder.run(work, self.offers)

    def _layer(self) -> None:
        """Go through the next layer, or on with it."""
        index, layers = self.index, self.cache.layers
        step = self.step = self._begun()
        try:
            if self.through is None:
                module, rotation = self.model.layers[index], self.rotations[index]
                self.through = module(self.hidden, position_embeddings=rotation, kvlite=step)
            trimmed = step.trimmed()
        finally:
            # What is given up next is looked for there.
            layers[index], self.rules[index] = step.layer, step.rule
        layers[index] = trimmed
        self.hidden, self.index, self.step, self.through = self.through, index + 1, None, None

    def _begun(self) -> LayerStep:
        """The step through the next layer, which may have become smaller since it began."""
        index, position = self.index, self.cache.seen
        layer, rule, step = self.cache.layers[index], self.rules[index], self.step
        if step is None:
            rotation, sight = self.rotations[index], self.sights[index]
            return LayerStep(index, layer, rule, position, rotation, sight, self.recall)
        step.layer, step.rule = layer, rule
        return step


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
    return Step(model, cache, token_ids, rules, recall).run()
