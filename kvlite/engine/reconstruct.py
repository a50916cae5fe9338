"""Context reconstruction: the model repeats the text, passage by passage, to find the entries it
needs.

Source: "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", section 3. There
the model repeats the text after the whole cache was read. Here each layer is scored by the
repetition as soon as it was read, and cut before the next, so the whole cache never exists.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvlite.cache import KVCache, KVHeadGroup, LayerCache
from kvlite.cache.recurrent import StateCarrier, States
from kvlite.engine.heads import over_head_groups
from kvlite.engine.layer_prefill import LayerPrefill, through, trails
from kvlite.engine.probe import Probe
from kvlite.memory.oom import Safely, at_once
from kvlite.methods.capabilities import Reconstruction
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation, rotations_after
from kvlite.offload import HostKVStore
from kvlite.ops.attention import attend, attend_causal, attention_peaks, merged
from kvlite.ops.softmax import Softmax

BEGIN = "\n\nRepeat the previous context exactly.\n\n"
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with "
REMINDER, SHORTEST = 8, 256


@dataclass
class Passage:
    """A part of what was read, and the rows that ask for it and say it.

    Attributes:
        first, end: positions of the part.
        hidden: `(batch, rows, hidden size)` on their way through the layers.
    """

    first: int
    end: int
    hidden: Tensor


def reconstruction_pass(
    model: LoadedModel,
    cache: KVCache,
    policies: Sequence[LayerPolicy],
    store: HostKVStore | None,
    text: Tensor,
    *,
    new: int,
    end: int,
    chunk: int,
) -> "ReconstructionPass | None":
    """What has to be repeated before layers are cut, if any method wants that.

    Args:
        text: `(batch, n)` int64, all that was read, the new tokens included.
        new: tokens that are read now.
        end: tokens that were read then, which `text` has to have.
        chunk: tokens that go through a layer together.
    """
    asked, begin = _asked_for(policies, cache, store, new)
    if asked is None:
        return None
    if text.shape[1] != end:
        raise ValueError("a method that has the model repeat what it read needs all of it")
    return ReconstructionPass(model, text, begin, asked, chunk=chunk)


def _asked_for(
    policies: Sequence[LayerPolicy], cache: KVCache, store: HostKVStore | None, new: int
) -> tuple[Reconstruction | None, int]:
    """How what was read has to be repeated before layers are cut, if any method wants that; and the
    position from which on it was not yet.

    Args:
        new: tokens that are read now.
    """
    asked, begin = None, cache.reconstructed
    for index, (policy, layer) in enumerate(zip(policies, cache.layers, strict=True)):
        if policy.method.prefilling.reconstruction is None:
            continue
        lengths = [(heads, used + new) for heads, used in layer.lengths]
        if store is not None and store.begun:
            source = store.layers[index]
            lengths = [(len(source.head_group.heads), source.read + new)]
            begin = begin if store.is_scored_by(policy.method.spec) else 0
        if not policy.keeps_all(lengths):
            asked = policy.method.prefilling.reconstruction
        if layer.entries_mean and not layer.rows and policy.method.across.resolving is None:
            begin = 0  # another method held this layer
    return asked, begin


class ReconstructionPass:
    """All passages, one layer at a time. Each follows what was read and none of the others, and
    nothing of them stays.

    Attributes:
        rows: tokens of all passages together.
    """

    def __init__(
        self,
        model: LoadedModel,
        context: Tensor,
        begin: int,
        reconstruction: Reconstruction,
        *,
        chunk: int,
    ) -> None:
        """Prepare to repeat what was not repeated yet.

        Args:
            context: `(batch, n)` int64, all that was read.
            begin: position of the first token that was not repeated yet.
            chunk: rows that go through a layer together.
        """
        self.model = model
        self.sinks = reconstruction.sinks
        self.fresh = begin == 0
        self.chunk = chunk
        self.end = context.shape[1]
        self.passages: list[Passage] = []
        size = self._size(reconstruction.passage)
        for first in range(begin, self.end, size):
            end = min(first + size, self.end)
            said = torch.cat([*self._asked(context, first), context[:, first:end]], 1)
            self.passages.append(Passage(first, end, model.embed(said)))
        rows = [passage.hidden.shape[1] for passage in self.passages]
        self.rows = sum(rows)
        self.rotations = rotations_after(model, self.end, max(rows))
        positions = torch.arange(
            self.end, self.end + max(rows), dtype=torch.int32, device=model.device
        )
        self.positions = model.by_layer(positions)

    def to_host(self) -> None:
        """Let hidden states wait in host memory."""
        for passage in self.passages:
            passage.hidden = passage.hidden.cpu()

    def _size(self, passage: int) -> int:
        """Tokens a passage, no more than the model was trained to see behind what it read; where
        there is no room left it goes a little beyond."""
        room = self.model.shape.max_context - self.end - len(self._encoded(GO_ON)) - REMINDER - 2
        return min(passage, max(room, SHORTEST))

    def _asked(self, context: Tensor, first: int) -> list[Tensor]:
        """Tokens that ask for the passage from `first` on, in plain words."""
        rows, device = context.shape[0], context.device
        parts = [
            torch.tensor([self._encoded(text)], dtype=torch.int64, device=device).expand(rows, -1)
            for text in ([BEGIN] if first == 0 else [GO_ON, "\n\n"])
        ]
        if first:
            parts.insert(1, context[:, max(0, first - REMINDER) : first])
        return parts

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.model.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def rate(
        self,
        index: int,
        read: LayerPrefill,
        *,
        answers: bool,
        safely: Safely = at_once,
    ) -> Iterator[int]:
        """Take every passage through a layer that holds all that was read.

        Args:
            read: what read it. The row of its head groups gets, where its method asks for it, the
                most attention that any query paid to an entry of its own passage.
            answers: whether a layer follows.
            safely: does each chunk.

        Yields:
            After every chunk, how many rows have gone through.
        """
        layer, policy, states, tiles = read.layer, read.policy, read.states, read.in_tiles
        rates, rows = policy.method.prefilling.reconstruction is not None, 0
        if rates and self.fresh:
            layer.clear_rows()
        for passage in self.passages:
            count, at = passage.hidden.shape[1], 0
            cos, sin = (each[:, :count] for each in self.rotations[index])
            rotation, part = (cos, sin), (passage.first, passage.end)
            positions = self.positions[index][:count]
            looking_on = partial(self._looking_on, layer, policy, positions, rotation, states)
            given = layer, part, self.sinks, positions, rotation, states, tiles
            rating = partial(Telling, *given)
            telling = safely(rating) if rates else safely(looking_on)
            while at < count:
                to = safely(partial(self._take, index, passage, telling, at, answers))
                rows, at = rows + to - at, to
                yield rows

    def _take(
        self,
        index: int,
        passage: Passage,
        telling: "Telling | LayerPrefill",
        at: int,
        answers: bool,
    ) -> int:
        """Take a chunk of a passage, from row `at` on, through a layer; the row after it."""
        span = slice(at, min(at + self.chunk, passage.hidden.shape[1]))
        hidden = passage.hidden[:, span].to(self.model.device_of(index))
        out = telling.take(self.model.layers[index], hidden, answers=answers)
        passage.hidden[:, span] = out
        return span.stop

    def _looking_on(
        self,
        layer: LayerCache,
        policy: LayerPolicy,
        positions: Tensor,
        rotation: Rotation,
        states: States,
    ) -> LayerPrefill:
        """Reads a passage into a copy of a layer that no method rates."""
        rows = len(positions)
        roomy = layer.resized([used + rows for _, used in layer.lengths])
        policy = replace(policy, method=Probe(1), budget=0)
        return LayerPrefill(roomy, policy, positions, self.end + rows, rotation, states=states)


@dataclass
class _Part:
    """What the rows of a passage look at in one head group, beside the rest of it.

    Attributes:
        low, high: slots of the passage.
        first: how many of the first entries are looked at.
        keys, values: of these entries, the passage and its rows so far, with room for all
            rows, `(batch, heads, slots, dim)`.
        used: slots filled.
    """

    low: int
    high: int
    first: int
    keys: Tensor
    values: Tensor
    used: int


class Telling:
    """Takes the rows of one passage through one layer, and rates its entries."""

    def __init__(
        self,
        layer: LayerCache,
        span: tuple[int, int],
        sinks: int,
        positions: Tensor,
        rotation: Rotation,
        states: States,
        in_tiles: bool,
    ) -> None:
        """Set aside what the rows are judged by.

        Args:
            layer: entries ascending in position; the rows of its head groups are raised.
            span: positions of the passage, first and end.
            sinks: first entries that are looked at beside it.
            positions, rotation: of the tokens to come.
            states: of the recurrent layers that run with it, after all that was read.
            in_tiles: as of `Softmax`.
        """
        self.layer, self.in_tiles = layer, in_tiles
        self.carrier = StateCarrier(states)
        self.positions, self.rotation = positions, rotation
        self.done = 0
        self.answers = True  # else the ratings are wanted alone
        rows = rotation[0].shape[1]
        self.parts = {
            head_group.heads: _part(head_group, span, sinks, rows)
            for head_group in layer.head_groups
        }

    def take(self, module: Any, hidden: Tensor, *, answers: bool = True) -> Tensor:
        """Put the next chunk through a decoder layer, as `layer_prefill.through` does, or leave
        everything as it was; ratings that are raised twice are the same."""
        self.answers = answers = answers or trails(module)
        span = slice(self.done, self.done + hidden.shape[1])
        cos, sin = (each[:, span] for each in self.rotation)
        at = self.positions[span]
        before = [part.used for part in self.parts.values()]
        try:
            out = through(module, hidden, at, (cos, sin), self, answers=answers)
        except BaseException:
            for part, used in zip(self.parts.values(), before, strict=True):
                part.used = used
            raise
        self.done, self.carrier = span.stop, StateCarrier(self.carrier.after)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """One chunk: over all that was read freely, over the passage's rows causally."""
        softmax = replace(softmax, in_tiles=self.in_tiles)

        def over(
            head_group: KVHeadGroup, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
        ) -> Tensor:
            part = self.parts[head_group.heads]
            own = slice(part.used, part.used + k.shape[2])
            part.keys[:, :, own], part.values[:, :, own], part.used = k, v, own.stop
            keys, values = part.keys[:, :, : own.stop], part.values[:, :, : own.stop]
            seen = attend_causal(q, keys, values, softmax)
            passage = keys[:, :, part.first : part.first + part.high - part.low]
            peaks = attention_peaks(q, passage, softmax.with_sinks(*seen)[1], softmax)
            head_group.raise_to(part.low, peaks)
            if not self.answers:
                return q
            keys, values = head_group.keys, head_group.values
            for rest in (slice(part.first, part.low), slice(part.high, head_group.used)):
                if rest.start < rest.stop:
                    others = keys[:, :, rest], values[:, :, rest]
                    seen = merged(seen, attend(q, *others, softmax, causal=False))
            return softmax.with_sinks(*seen)[0]

        return over_head_groups(self.layer, q, k, v, softmax, over)


def _part(head_group: KVHeadGroup, span: tuple[int, int], sinks: int, rows: int) -> _Part:
    """The first few entries and a passage, which may lie in other slots in other heads: from the
    first slot that any head has of it to the last."""
    count = min(span[1] - span[0], head_group.used)
    low = min(span[0], head_group.used - count)
    high = low + count
    if not head_group.residual_positions.is_meta:
        positions = head_group.positions[:, :, : head_group.used]
        low = int((positions < span[0]).sum(-1).min())
        high = int((positions < span[1]).sum(-1).max())
    first = min(sinks, low)
    keys, values = (
        torch.cat(
            [
                each[:, :, :first],
                each[:, :, low:high],
                each.new_empty(*each.shape[:2], rows, each.shape[3]),
            ],
            2,
        )
        for each in (head_group.keys, head_group.values)
    )
    return _Part(low, high, first, keys, values, first + high - low)
