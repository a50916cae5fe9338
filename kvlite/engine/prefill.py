"""Reading: all new tokens through one layer, that layer compressed, then the next layer.

Exact (the same logits as reading in one piece), and its peak is the hidden states, one layer's
keys and values, the compressed layers before it, and one chunk's activations.
"""

from collections.abc import Callable
from threading import Event

import torch
from torch import Tensor

from kvlite.attention import attend_causal, attend_masked, attention_sums
from kvlite.cache import Bank, KVCache, LayerCache, Selection
from kvlite.cache.cache import Mark
from kvlite.engine.heads import over_banks
from kvlite.engine.queries import QueryStatistics
from kvlite.engine.sight import Sight, make_room, require_served, sights
from kvlite.errors import Stopped
from kvlite.methods.base import LayerView, Outlook
from kvlite.methods.rules import ROOM, Rule, merge_below, share_out
from kvlite.methods.scores import Window
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation, unrotated

CHUNK = 1024

Progress = Callable[[int, int], None]


class LayerReader:
    """Runs one layer over the new tokens chunk by chunk, keeping its keys, values and the last
    queries.

    Attributes:
        layer: everything read so far; written in place.
        answers: whether attention is wanted, or keys, values and queries alone.
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
    ) -> None:
        """Read tokens into a layer that has room for them, or for a chunk of them under a mask.

        Args:
            positions: theirs, `(n,)` int32, ascending.
            end: the position after the last.
            rotation: of these positions.
            sight: how the layer sees, if not everything that it holds.
            coming: mean rotation of the positions to come, if queries there are to be expected.
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
        self.answers = True
        self.kv_heads = 0
        self.scale = 1.0
        self.softcap: float | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """One chunk: over all earlier entries freely, over itself causally; without `answers`
        the result means nothing."""
        self.kv_heads, self.scale, self.softcap = k.shape[1], scale, softcap
        length = q.shape[2]
        if self.sight is not None:
            make_room(self.layer, self.sight.mask, length)
        after = self.positions.shape[0] - self.done - length
        wanted = max(0, min(length, self.observed - after))
        if wanted or not after:
            self.queries.append(q[:, :, length - wanted :].clone())
        outlook = self.rule.method.outlook
        if outlook is not None:
            late = self.positions[self.done : self.done + length] >= outlook.skipped
            self.statistics.add(unrotated(q, self._rotation(length))[:, :, late])
        out = over_banks(self.layer, q, k, v, self._over_bank)
        self.done += length
        return out

    def _over_bank(self, bank: Bank, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before, window = bank.used, self.rule.window
        bank.append(k, v, self.positions[self.done : self.done + q.shape[2]])
        if not self.answers:
            return q
        keys, values = bank.keys[:, :, : bank.used], bank.values[:, :, : bank.used]
        if window is not None and bank.used > window:
            return self._over_window(bank, q, before, window)
        if self.sight is not None:
            first = self.end - self.positions.shape[0] + self.done
            own = self._rotation(q.shape[2])
            return self.sight.attend(q, keys, values, first, own, self.scale, self.softcap)
        out, lse = attend_causal(q, keys, values, scale=self.scale, softcap=self.softcap)
        if self.rule.method.cumulative:
            bank.add(attention_sums(q, keys, lse, scale=self.scale, softcap=self.softcap))
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

    def view(self, index: int) -> LayerView:
        """What a method is shown of the layer, the `index`-th, once all chunks went through."""
        queries = torch.cat(self.queries, 2)
        start = self.end - queries.shape[2]
        expected = None if self.coming is None else self.statistics.expected(self.coming)
        window = Window(queries, start, self.kv_heads, self.scale, self.softcap, expected)
        return LayerView(index, self.layer.banks, window, self.rule.budget, like=self.layer.like)


class Reading:
    """New tokens on their way through the layers, one layer at a time.

    Attributes:
        hidden: `(batch, n, hidden size)` of the tokens still on their way.
        rows: `(n,)` int64, which of the new tokens these are; None while it is all of them.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        token_ids: Tensor,
        rules: list[Rule],
        *,
        reserve: int = 0,
        chunk: int = CHUNK,
        progress: Progress | None = None,
        cancel: Event | None = None,
        whole: bool = False,
    ) -> None:
        """As in `prefill`.

        Args:
            whole: take every token, not the last alone, through the rest of the final layer, so
                that `hidden` has what follows each of them.
        """
        cache.require_whole()
        require_served(model, rules, cache.layers, cache.seen)
        self.model = model
        self.cache = cache
        self.rules = rules
        self.room = min(reserve, ROOM)
        self.chunk = chunk
        self.progress = progress
        self.cancel = cancel
        self.whole = whole
        self.new = token_ids.shape[1]
        self.hidden = model.embed(token_ids)
        self.rows: Tensor | None = None
        self.rotations = model.rotations(cache.seen, self.new)
        self.sights = sights(model, rules)
        outlooks = [rule.method.outlook for rule in rules]
        coming = {each: self._coming(each) for each in {*outlooks} if each is not None}
        self.coming = [
            None if each is None else coming[each][layer] for layer, each in enumerate(outlooks)
        ]
        end = cache.seen + self.new
        self.positions = torch.arange(cache.seen, end, dtype=torch.int32, device=model.device)
        self.marks: dict[int, list[Mark]] = {}
        self.capacities = [[bank.capacity for bank in layer.banks] for layer in cache.layers]

    def read_layer(self, index: int) -> LayerReader:
        """Take all tokens through one layer. Let go of the reader before the next: it holds the
        layer's whole keys and values.

        Raises:
            Stopped: `cancel` was set.
        """
        rule, module = self.rules[index], self.model.layers[index]
        cos, sin, positions = *self.rotations[index], self.positions
        if self.rows is not None:
            cos, sin, positions = cos[:, self.rows], sin[:, self.rows], positions[self.rows]
        end, length = self.cache.seen + self.new, self.hidden.shape[1]
        reader = LayerReader(
            self._roomy(index),
            rule,
            positions,
            end,
            (cos, sin),
            self.sights[index],
            self.coming[index],
        )
        for span in self._spans(index):
            if self.cancel is not None and self.cancel.is_set():
                raise Stopped
            hidden = self.hidden[:, span]
            given = {"position_embeddings": (cos[:, span], sin[:, span]), "kvlite": reader}
            reader.answers = not self._final(index) or span.stop == length or rule.method.cumulative
            if reader.answers:
                self.hidden[:, span] = module(hidden, **given)
            else:
                # Nothing reads the final layer's output but the last token: of the others it
                # needs keys, values and queries alone.
                module.self_attn(module.input_layernorm(hidden), attention_mask=None, **given)
            if self.progress is not None:
                so_far = index * self.new + span.stop * self.new // length
                self.progress(so_far, len(self.rules) * self.new)
        return reader

    def compressed(self, index: int) -> LayerCache:
        """One layer read, and what its rule keeps of it; all of it, if it is to be merged."""
        reader = self.read_layer(index)
        view = reader.view(index)
        self._narrow(view)
        if self.rules[index].method.settles == "read":
            self.rules[index] = self.rules[index].settled(view)
        if index in self.marks or self.rules[index].partner is not None:
            self.rules[index].cast_first_votes(reader.layer, view.window)
            return reader.layer
        return self.rules[index].cut(view, self.room)

    def _narrow(self, view: LayerView) -> None:
        """Leave behind the tokens that the next layer is not given."""
        after, through = self.rules[view.layer + 1 :], self.hidden.shape[1]
        narrowing = after[0].narrowing if after else None
        if narrowing is None or narrowing.width >= through:
            return
        going = narrowing.method.narrow(view, through, narrowing.width)
        self.hidden = self.hidden[:, going]
        self.rows = going if self.rows is None else self.rows[going]

    def logits(self) -> Tensor:
        """Next-token logits `(batch, vocab)` float32, after the last layer."""
        return self.model.logits(self.hidden[:, -1])

    def rewind(self) -> None:
        """Make the cache what it was before."""
        for index, marks in self.marks.items():
            layer, rows = self.cache.layers[index], self.rules[index].method.decode_rows
            layer.rewind(marks)
            self.cache.layers[index] = layer.resized(self.capacities[index], rows)

    def _roomy(self, index: int) -> LayerCache:
        """A layer with room for the new tokens: the cache's own, grown, where all of it will stay
        and as many rows be remembered; else a copy, so that stopping loses nothing. A method that
        overwrites entries needs them written out."""
        rule, layer = self.rules[index], self.cache.layers[index]
        lines = [(heads, used + self.hidden.shape[1]) for heads, used in layer.lines]
        rows = rule.method.decode_rows
        same = layer.rows == rows or not layer.entries_mean
        same &= not (layer.computed and rule.method.bounded)
        counted = [(heads, used + self.hidden.shape[1]) for heads, used in rule.counted(layer)]
        if not rule.keeps_all(counted) or rule.method.settles == "read" or not same:
            sizes = [entries for _, entries in lines]
            if rule.mask is not None:
                sizes = [
                    min(size, max(used, rule.budget) + self.chunk)
                    for (_, used), size in zip(layer.lines, sizes, strict=True)
                ]
                # What slides must be written out, not lie behind a front.
                everything = [Selection.everything(bank) for bank in layer.banks]
                return LayerCache.gathered(everything, sizes, like=layer.like)
            return layer.resized(sizes, rows if rule.method.cumulative else 0)
        sizes = rule.capacities(lines, self.room)
        layer = self.cache.layers[index] = layer.resized(sizes, rows)
        self.marks[index] = layer.mark()
        return layer

    def _coming(self, outlook: Outlook) -> list[Rotation]:
        """Mean rotations of the positions after the last, as far as the model's context goes."""
        end = self.cache.seen + self.new
        count = max(1, min(outlook.future, self.model.shape.max_context - end))
        return [
            (cos.float().mean(1, keepdim=True), sin.float().mean(1, keepdim=True))
            for cos, sin in self.model.rotations(end, count)
        ]

    def _final(self, index: int) -> bool:
        return index == len(self.rules) - 1 and not self.whole

    def _spans(self, index: int) -> list[slice]:
        """The chunks; in the final layer the last token is one by itself."""
        length = self.hidden.shape[1]
        end = length - 1 if self._final(index) else length
        spans = [slice(at, min(at + self.chunk, end)) for at in range(0, end, self.chunk)]
        return [*spans, slice(end, length)] if self._final(index) else spans


def empty_cache(model: LoadedModel) -> KVCache:
    """A cache for one sequence of this model, which has seen nothing."""
    shape = model.shape
    return KVCache.empty(
        shape.layers, shape.kv_heads, shape.head_dim, dtype=model.dtype, device=model.device
    )


@torch.inference_mode()
def prefill(
    model: LoadedModel,
    cache: KVCache,
    token_ids: Tensor,
    rules: list[Rule],
    *,
    reserve: int = 0,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    cancel: Event | None = None,
) -> Tensor:
    """Read `token_ids` into `cache`, compressing each layer as soon as it is done.

    Args:
        token_ids: `(batch, n)` int64, n >= 1, the tokens that follow what the cache has seen.
        rules: one a layer; where a method settles once it has read, that is put here.
        reserve: tokens the answer may have; lines that grow get room for up to `ROOM` of them at
            once.
        chunk: tokens that go through a layer together; any value gives the same result.
        progress: told (layer-tokens done, of how many) after every chunk.
        cancel: checked before every chunk.

    Returns:
        Logits of the next token, `(batch, vocab)` float32.

    Raises:
        Stopped: `cancel` was set; the cache is as it was, as after any other exception.
    """
    reading = Reading(
        model,
        cache,
        token_ids,
        rules,
        reserve=reserve,
        chunk=chunk,
        progress=progress,
        cancel=cancel,
    )
    try:
        layers: list[LayerCache] = []
        for index in range(len(rules)):
            layers.append(reading.compressed(index))
            merge_below(layers, rules, index, reading.room)
        share_out(layers, rules, reading.room)
        logits = reading.logits()
    except BaseException:
        reading.rewind()
        raise
    cache.layers = layers
    cache.seen += reading.new
    return logits
