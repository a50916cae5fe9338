"""Answering: one token a step through all layers, written in place."""

import torch
from torch import Tensor

from kvlite.attention import attend, attend_with_rows, grouped
from kvlite.cache import Bank, KVCache, LayerCache, Selection
from kvlite.engine.prefill import ROOM, line_capacity
from kvlite.methods.rules import Rule
from kvlite.model.load import LoadedModel


class LayerStep:
    """Runs one layer over one new token a sequence."""

    def __init__(self, layer: LayerCache, rule: Rule, position: int) -> None:
        self.layer = layer
        self.rule = rule
        self.position = position

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Write the token into every bank, then attend over all of it."""
        if any(not bank.room and self._may_grow(bank) for bank in self.layer.banks):
            sizes = [line_capacity(self.rule, bank.used, ROOM) for bank in self.layer.banks]
            self.layer = self.layer.resized(sizes, self.rule.method.decode_rows)
        banks = self.layer.banks
        if len(banks) == 1:
            return self._over_bank(q, k, v, banks[0], scale, softcap)
        out = torch.empty_like(q)
        by_head = grouped(out, k.shape[1])
        for bank in banks:
            heads = list(bank.heads)
            part = self._over_bank(
                grouped(q, k.shape[1])[:, heads].flatten(1, 2),
                k[:, heads],
                v[:, heads],
                bank,
                scale,
                softcap,
            )
            by_head[:, heads] = grouped(part, len(heads))
        return out

    def _may_grow(self, bank: Bank) -> bool:
        return not self.rule.method.bounded or bank.used < self.rule.budget

    def _over_bank(
        self, q: Tensor, k: Tensor, v: Tensor, bank: Bank, scale: float, softcap: float | None
    ) -> Tensor:
        if bank.room:
            bank.append(k, v, self.position)
        else:
            slots = self.rule.method.evict(bank, self.rule.budget)
            bank.overwrite(slots, k, v, self.position)
        keys, values = bank.keys[:, :, : bank.used], bank.values[:, :, : bank.used]
        if bank.rows is None:
            return attend(q, keys, values, scale=scale, softcap=softcap, causal=False)[0]
        out, rows = attend_with_rows(q, keys, values, scale=scale, softcap=softcap)
        bank.record(rows[:, :, 0])
        return out

    def trimmed(self) -> LayerCache:
        """The layer after the step: smaller, in storage of its own, if the method cuts it now."""
        method = self.rule.method
        kept = [method.trim(bank, self.rule.budget) for bank in self.layer.banks]
        if all(slots is None for slots in kept):
            return self.layer
        selections = [
            Selection(bank, slots)
            for bank, slots in zip(self.layer.banks, kept, strict=True)
            if slots is not None
        ]
        sizes = [line_capacity(self.rule, s.slots.shape[2], ROOM) for s in selections]
        return LayerCache.gathered(selections, sizes, method.decode_rows)


@torch.inference_mode()
def decode_step(
    model: LoadedModel,
    cache: KVCache,
    token_ids: Tensor,
    rules: list[Rule],
    rotation: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Put one token a sequence through the model.

    Args:
        token_ids: `(batch,)` int64.
        rules: one a layer.
        rotation: cos and sin, `(1, 1, dim)`, of the token's position, for every layer.

    Returns:
        Logits of the next token, `(batch, vocab)` float32.
    """
    cache.require_whole()
    cache.writing = True
    hidden = model.embed(token_ids[:, None])
    for index, (module, rule) in enumerate(zip(model.layers, rules, strict=True)):
        step = LayerStep(cache.layers[index], rule, cache.seen)
        hidden = module(hidden, position_embeddings=rotation[index], kvlite=step)
        cache.layers[index] = step.trimmed()
    cache.seen += 1
    cache.writing = False
    return model.logits(hidden[:, -1])
