"""One layer reads, chunk by chunk: over all earlier entries freely, over itself causally."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlite.cache import Bank, LayerCache
from kvlite.engine.heads import over_banks
from kvlite.engine.query_stats import QueryStatistics
from kvlite.engine.sparse_attention import Sight, make_room
from kvlite.engine.vertical_slash import attend_columns
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import Rule
from kvlite.methods.placement import ON_DEVICE, Desk
from kvlite.methods.scores import Window
from kvlite.model.attention_interface import Attender
from kvlite.model.rotary import Rotation, unrotated
from kvlite.ops.attention import attend_causal, attend_masked, attention_sums, grouped


def through(
    module: Any, hidden: Tensor, rotation: Rotation, attender: Attender, *, answers: bool
) -> Tensor:
    """Put tokens through a decoder layer.

    Args:
        hidden: `(batch, L, hidden size)`.
        rotation: of their positions.
        attender: gets their queries, keys and values.
        answers: whether what comes out is wanted, or keys, values and queries alone; then
            `hidden` itself is returned.
    """
    given = {"position_embeddings": rotation, "kvlite": attender}
    if not answers:
        module.self_attn(module.input_layernorm(hidden), attention_mask=None, **given)
        return hidden
    out: Tensor = module(hidden, **given)
    return out


@dataclass
class Found:
    """What was found while one chunk went through; it counts once all of the chunk is.

    Attributes:
        length: of the chunk.
        queries: its last, where they are among the last that are observed.
        energy, statistics: as the reader's, this chunk's queries counted too.
        sums: attention that entries of a bank got, where it is added up.
    """

    length: int
    queries: Tensor | None
    energy: Tensor | None
    statistics: QueryStatistics
    sums: list[tuple[Bank, Tensor]] = field(default_factory=list)


class LayerReader:
    """Runs one layer over the new tokens chunk by chunk, keeping its keys, values and the last
    queries. A chunk that was not got through, because memory ran out, may be taken once more.

    Attributes:
        layer: everything read so far; written in place.
        found: of the chunk that goes through now.
        energy: squares of all queries, summed, `(batch, KV heads, dim)` float32; None if nobody
            asked.
    """

    def __init__(
        self,
        layer: LayerCache,
        rule: Rule,
        positions: Tensor,
        end: int,
        rotation: Rotation,
        sight: Sight | None = None,
        coming: Rotation | None = None,
        measures: bool = False,
    ) -> None:
        """Read tokens into a layer that has room for them, or for a chunk of them under a mask.

        Args:
            positions: theirs, `(n,)` int32, ascending.
            end: the position after the last.
            rotation: of these positions.
            sight: how the layer sees, if not everything that it holds.
            coming: mean rotation of the positions to come, if queries there are to be expected.
            measures: whether `energy` is asked for.
        """
        method = rule.method
        self.layer = layer
        self.rule = rule
        self.positions = positions
        self.end = end
        self.rotation = rotation
        self.sight = sight
        self.coming = coming
        self.statistics = QueryStatistics()
        self.done = 0
        self.observed = max(method.observation(rule.budget), method.decode_rows)
        self.queries: list[Tensor] = []
        self.energy = torch.zeros((), device=positions.device) if measures else None
        self.answers = True  # else keys, values and queries are wanted alone
        self.found: Found | None = None
        self.kv_heads = 0
        self.scale = 1.0
        self.softcap: float | None = None

    def take(self, module: Any, hidden: Tensor, *, answers: bool = True) -> Tensor:
        """Put the next chunk through a decoder layer, as `through` does, or leave everything as it
        was."""
        self.answers = answers
        length = hidden.shape[1]
        rotation = self._rotation(length)
        if self.sight is not None:
            make_room(self.layer, self.sight.mask, length)
        before = [bank.used for bank in self.layer.banks]
        try:
            out = through(module, hidden, rotation, self, answers=answers)
        except BaseException:
            for bank, used in zip(self.layer.banks, before, strict=True):
                bank.used = used
            self.found = None
            raise
        self.count()
        return out

    def count(self) -> None:
        """Let the chunk that went through be one of those before the next; allocates nothing."""
        found, self.found = self.found, None
        assert found is not None
        if found.queries is not None:
            self.queries.append(found.queries)
        for bank, sums in found.sums:
            bank.add(sums)
        self.energy, self.statistics = found.energy, found.statistics
        self.done += found.length

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """One chunk, to be followed by `count`: over all earlier entries freely, over itself
        causally; without `answers` the result means nothing."""
        self.kv_heads, self.scale, self.softcap = k.shape[1], scale, softcap
        self.found = self._found(q)
        return over_banks(self.layer, q, k, v, self._over_bank)

    def _found(self, q: Tensor) -> Found:
        """What a chunk's queries tell."""
        length, queries, energy, statistics = q.shape[2], None, self.energy, self.statistics
        if energy is not None:
            energy = energy + grouped(q, self.kv_heads).float().square().sum(3).mean(2)
        after = self.positions.shape[0] - self.done - length
        wanted = max(0, min(length, self.observed - after))
        if wanted or not after:
            queries = q[:, :, length - wanted :].clone()
        outlook = self.rule.method.outlook
        if outlook is not None:
            late = self.positions[self.done : self.done + length] >= outlook.skipped
            statistics = statistics.joined(unrotated(q, self._rotation(length))[:, :, late])
        return Found(length, queries, energy, statistics)

    def _over_bank(self, bank: Bank, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before, window = bank.used, self.rule.window
        bank.append(k, v, self.positions[self.done : self.done + q.shape[2]])
        if not self.answers:
            return q
        keys, values = bank.keys[:, :, : bank.used], bank.values[:, :, : bank.used]
        if window is not None and bank.used > window:
            return self._over_window(bank, q, before, window)
        first, looks_at = self.end - self.positions.shape[0] + self.done, self.rule.method.looks_at
        if self.sight is not None:
            own = self._rotation(q.shape[2])
            return self.sight.attend(q, keys, values, first, own, self.scale, self.softcap)
        if looks_at is not None:
            at, given = bank.positions[..., : bank.used], (self.scale, self.softcap)
            seen = attend_columns(q, keys, values, at, first, looks_at, *given)
            if seen is not None:
                return seen
        out, lse = attend_causal(q, keys, values, scale=self.scale, softcap=self.softcap)
        if self.rule.method.cumulative:
            assert self.found is not None
            sums = attention_sums(q, keys, lse, scale=self.scale, softcap=self.softcap)
            self.found.sums.append((bank, sums))
        return out

    def _rotation(self, length: int) -> Rotation:
        """Of the chunk of `length` tokens that is being read."""
        cos, sin = self.rotation
        chunk = slice(self.done, self.done + length)
        return cos[:, chunk], sin[:, chunk]

    def _over_window(self, bank: Bank, q: Tensor, before: int, window: int) -> Tensor:
        """An entry is visible to rows at its position and up to `window` - 1 after it: a band,
        cut into blocks of rows so that each mask is about window x window."""
        outs = []
        positions = bank.positions[0, 0]  # a window holds the same for every head and sequence
        block = max(window, 256)
        for first in range(0, q.shape[2], block):
            rows = q[:, :, first : first + block]
            low = max(0, before + first - window + 1)
            high = before + first + rows.shape[2]
            i, j = positions[before + first : high, None], positions[low:high]
            outs.append(
                attend_masked(
                    rows,
                    bank.keys[:, :, low:high],
                    bank.values[:, :, low:high],
                    (j <= i) & (j > i - window),
                    scale=self.scale,
                    softcap=self.softcap,
                )
            )
        return torch.cat(outs, 2)

    def view(self, index: int, desk: Desk = ON_DEVICE) -> LayerView:
        """What a method is shown of the layer, the `index`-th, once all chunks went through.

        Args:
            desk: where attention becomes a choice.
        """
        queries = torch.cat(self.queries, 2)
        start = self.end - queries.shape[2]
        expected = None if self.coming is None else self.statistics.expected(self.coming)
        window = Window(queries, start, self.kv_heads, self.scale, self.softcap, expected, desk)
        return LayerView(index, self.layer.banks, window, self.rule.budget, like=self.layer.like)
