"""Reading: all new tokens through one layer, that layer compressed, then the next layer.

Exact (the same logits as reading in one piece) unless the method reads otherwise, and its peak is
the hidden states, one layer's keys and values, the compressed layers before it, and one chunk's
activations.
"""

from collections.abc import Callable
from functools import partial
from threading import Event

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache, Selection
from kvlite.cache.layer import Mark
from kvlite.engine.reader import LayerReader
from kvlite.engine.rehearsal import Repetition
from kvlite.engine.sight import require_served, sights
from kvlite.errors import Stopped
from kvlite.methods.base import LayerView, Outlook
from kvlite.methods.desk import ON_DEVICE, Desk
from kvlite.methods.rules import ROOM, Rule, merge_below, share_out
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation
from kvlite.offload import Tier

CHUNK = 1024

Progress = Callable[[int, int], None]


class Reading:
    """New tokens on their way through the layers, one layer at a time.

    Attributes:
        hidden: `(batch, n, hidden size)` of the tokens still on their way.
        rows: `(n,)` int64, which of the new tokens these are; None while it is all of them.
        repetition: of what was read, if a method judges by that.
        rehearsed: tokens that the cache will hold judgements of.
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
        context: Tensor | None = None,
        tier: Tier | None = None,
        desk: Desk = ON_DEVICE,
        whole: bool = False,
    ) -> None:
        """As in `prefill`.

        Args:
            whole: take every token, not the last alone, through the rest of the final layer, so
                that `hidden` has what follows each of them.
        """
        if tier is None or not tier.begun:
            cache.require_whole()
        require_served(model, rules, cache.layers, cache.seen)
        self.model = model
        self.cache = cache
        self.tier = tier
        self.desk = desk
        if tier is not None:
            tier.mark()
        self.rules = rules
        self.reserve = reserve
        self.room = min(reserve, ROOM)
        self.chunk = chunk
        self.progress = progress
        self.cancel = cancel
        self.whole = whole
        self.start = tier.seen if tier is not None and tier.begun else cache.seen
        self.new = token_ids.shape[1]
        self.end = self.start + self.new
        self.hidden = model.embed(token_ids)
        self.rows: Tensor | None = None
        self.rotations = model.rotations(self.start, self.new)
        self.sights = sights(model, rules)
        outlooks = [rule.method.outlook for rule in rules]
        coming = {each: self._coming(each) for each in {*outlooks} if each is not None}
        self.coming = [
            None if each is None else coming[each][layer] for layer, each in enumerate(outlooks)
        ]
        self.positions = torch.arange(self.start, self.end, dtype=torch.int32, device=model.device)
        self.marks: dict[int, list[Mark]] = {}
        self.repetition = self._repetition(
            token_ids if context is None else torch.cat([context, token_ids], 1)
        )
        rehearses = any(rule.method.rehearsal for rule in rules)
        self.rehearsed = self.end if self.repetition else cache.rehearsed if rehearses else 0
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
        length = self.hidden.shape[1]
        layer = self._roomy(index)
        if rule.method.cumulative and self.cache.rehearsed:
            layer.clear_rows()  # they hold what a rehearsal found, not sums
        reader = LayerReader(
            layer,
            rule,
            positions,
            self.end,
            (cos, sin),
            self.sights[index],
            self.coming[index],
            measures=self.tier is not None,
        )
        spans = self._spans(index)
        reader.done = spans[0].start
        for span in spans:
            self._require_wanted()
            # Nothing reads the final layer's output but the last token: of the others it needs
            # keys, values and queries alone.
            answers = not self._final(index) or span.stop == length or rule.method.cumulative
            hidden = self.hidden[:, span]
            self.hidden[:, span] = reader.take(module, hidden, answers=answers)
            self._passed(index, span.stop * self.new // length)
        if self.repetition is not None:
            answers = index < len(self.rules) - 1
            passed = partial(self._repeated, index)
            self.repetition.rate(index, layer, rule, answers=answers, passed=passed)
        return reader

    def _passed(self, index: int, rows: int) -> None:
        """Say how far reading is: rows of layer `index`, those of a repetition after the tokens."""
        if self.progress is not None:
            each = self.new + (0 if self.repetition is None else self.repetition.rows)
            self.progress(index * each + rows, len(self.rules) * each)

    def _repeated(self, index: int, rows: int) -> None:
        self._passed(index, self.new + rows)
        self._require_wanted()

    def _require_wanted(self) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise Stopped

    def compressed(self, index: int) -> LayerCache:
        """One layer read, and what its rule keeps of it; all of it, if it is to be merged."""
        reader = self.read_layer(index)
        view = reader.view(index, self.desk)
        self.remember(index, reader)
        self._narrow(view)
        if self.rules[index].method.settles == "read":
            self.rules[index] = self.rules[index].settled(view)
        if index in self.marks or self.rules[index].partner is not None:
            self.rules[index].cast_first_votes(reader.layer, view.window)
            return reader.layer
        return self.rules[index].cut(view, self.room)

    def remember(self, index: int, reader: LayerReader) -> None:
        """Hand over to the tier, if there is one, what was read and what a method found of it:
        before anything is dropped."""
        if self.tier is None or reader.energy is None:
            return
        layer, method = reader.layer, self.rules[index].method
        self.tier.add(index, layer, reader.energy, self.hidden.shape[1], self.reserve)
        if method.judges_once and layer.rows:
            found = layer.in_order([bank.scores() for bank in layer.banks])
            self.tier.judge(index, found, method.spec)

    def _narrow(self, view: LayerView) -> None:
        """Leave behind the tokens that the next layer is not given."""
        after, through = self.rules[view.layer + 1 :], self.hidden.shape[1]
        narrowing = after[0].narrowing if after else None
        if narrowing is None or narrowing.width >= through:
            return
        with self.desk.timed():
            going = narrowing.method.narrow(view, through, narrowing.width)
            going = self.desk.slots(going).long()
        self.hidden = self.hidden[:, going]
        self.rows = going if self.rows is None else self.rows[going]

    def logits(self) -> Tensor:
        """Next-token logits `(batch, vocab)` float32, after the last layer."""
        return self.model.logits(self.hidden[:, -1])

    def rewind(self) -> None:
        """Make the cache, and the tier, what they were before."""
        if self.tier is not None:
            self.tier.rewind()
        for index, marks in self.marks.items():
            layer, rows = self.cache.layers[index], self.rules[index].method.decode_rows
            layer.rewind(marks)
            self.cache.layers[index] = layer.resized(self.capacities[index], rows)

    def _roomy(self, index: int) -> LayerCache:
        """A layer with room for the new tokens: the cache's own, grown, where all of it will stay
        as it is and as many rows be remembered; else a copy, so that stopping loses nothing, with
        what is quantized written out; or all that it ever read, where the cache has lost some and
        a tier has it."""
        rule, layer = self.rules[index], self.cache.layers[index]
        if self.tier is not None and self.tier.begun:
            judge = rule.method.spec if rule.method.judges_once else ""
            return self.tier.restored(index, self.hidden.shape[1], layer.keys.device, judge)
        lines = [(heads, used + self.hidden.shape[1]) for heads, used in layer.lines]
        rows = rule.method.decode_rows
        same = layer.rows == rows or not layer.entries_mean
        same &= not (layer.computed and rule.method.bounded)
        same &= rule.packs is None and not layer.packed
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
                return LayerCache.gathered(
                    everything, sizes, like=layer.like, origins=rule.bits is not None
                )
            origins = rule.bits is not None and rule.partner is None
            held = rows if rule.method.judges_once else 0
            return layer.resized(sizes, held, origins=origins)
        sizes = rule.capacities(lines, self.room)
        layer = self.cache.layers[index] = layer.resized(sizes, rows)
        self.marks[index] = layer.mark()
        return layer

    def _repetition(self, context: Tensor) -> Repetition | None:
        """What has to be repeated before layers are cut, if any method wants that.

        Args:
            context: `(batch, n)` int64, all that was read, these tokens included.
        """
        asked, begin = None, self.cache.rehearsed
        for index, (rule, layer) in enumerate(zip(self.rules, self.cache.layers, strict=True)):
            if rule.method.rehearsal is None:
                continue
            lines = [(heads, used + self.new) for heads, used in layer.lines]
            if self.tier is not None and self.tier.begun:
                source = self.tier.layers[index]
                lines = [(len(source.bank.heads), source.read + self.new)]
                begin = begin if self.tier.judged_by(rule.method.spec) else 0
            if not rule.keeps_all(lines):
                asked = rule.method.rehearsal
            if layer.entries_mean and not layer.rows and rule.method.settles is None:
                begin = 0  # another method held this layer
        if asked is None:
            return None
        if context.shape[1] != self.end:
            raise ValueError("a method that has the model repeat what it read needs all of it")
        return Repetition(self.model, context, begin, asked, chunk=self.chunk)

    def _coming(self, outlook: Outlook) -> list[Rotation]:
        """Mean rotations of the positions after the last, as far as the model's context goes."""
        count = max(1, min(outlook.future, self.model.shape.max_context - self.end))
        return [
            (cos.float().mean(1, keepdim=True), sin.float().mean(1, keepdim=True))
            for cos, sin in self.model.rotations(self.end, count)
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
    context: Tensor | None = None,
    tier: Tier | None = None,
    desk: Desk = ON_DEVICE,
    reserve: int = 0,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    cancel: Event | None = None,
) -> Tensor:
    """Read `token_ids` into `cache`, compressing each layer as soon as it is done.

    Args:
        token_ids: `(batch, n)` int64, n >= 1, the tokens that follow what the cache has seen; or,
            with a tier that has begun, what that has seen.
        rules: one a layer; where a method settles once it has read, that is put here.
        context: `(batch, seen)` int64, the tokens before them; only methods that have the model
            repeat what it read need it.
        tier: takes everything that is read. Once it has, layers read on from there, not from the
            cache: reading is exact, and what is kept is chosen anew from all.
        desk: where attention becomes a choice of what is kept.
        reserve: tokens the answer may have; lines that grow get room for up to `ROOM` of them at
            once.
        chunk: tokens that go through a layer together; any value gives the same result, unless the
            method looks at parts of what lies before a chunk.
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
        context=context,
        tier=tier,
        desk=desk,
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
        share_out(layers, rules, reading.room, desk)
        logits = reading.logits()
    except BaseException:
        reading.rewind()
        raise
    cache.layers = layers
    cache.seen = reading.end
    cache.writing = False
    if tier is not None:
        tier.read(reading.end)
    cache.rehearsed = reading.rehearsed
    return logits
