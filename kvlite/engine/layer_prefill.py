"""One layer reads chunk by chunk: it attends to all earlier entries, and causally within the
chunk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache
from kvlite.cache.query_log import QueryLog
from kvlite.cache.recurrent import StateCarrier, States
from kvlite.engine.heads import over_head_groups, over_what_is_held
from kvlite.engine.sparse_attention import SparseAttentionMask, make_room
from kvlite.engine.vertical_slash import attend_vertical_slash
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.methods.placement import ON_DEVICE, ScoringBackend
from kvlite.methods.scores import Window
from kvlite.model.attention_interface import Attender, Lender
from kvlite.model.rotary import Rotation
from kvlite.model.window import LocalWindow
from kvlite.ops.attention import attend_causal, attend_masked, attention_sums, grouped
from kvlite.ops.softmax import Softmax


def through(
    module: Any,
    hidden: Tensor,
    positions: Tensor,
    rotation: Rotation,
    attender: Attender,
    *,
    answers: bool,
) -> Tensor:
    """Put tokens through a decoder layer.

    Args:
        hidden: `(batch, L, hidden size)`.
        positions: theirs, `(L,)`.
        rotation: of these.
        attender: gets their queries, keys and values.
        answers: whether what comes out is wanted, or keys, values and queries alone; then
            what is returned means nothing.
    """
    given = {
        "position_ids": positions[None],
        "position_embeddings": rotation,
        "kvlite": attender,
    }
    if hasattr(module, "trailing"):  # layers as one, which know what is not wanted then
        given["answers"] = answers
    elif not answers:
        # OLMo and EXAONE norm what comes out of attention, not what goes in.
        norm = getattr(module, "input_layernorm", None)
        seen = hidden if norm is None else norm(hidden)
        module.self_attn(seen, attention_mask=None, **given)
        return hidden
    out: Tensor = module(hidden, **given)
    return out


def trails(module: Any) -> bool:
    """Whether layers follow that take what attention answers, though no other attention does."""
    return getattr(module, "trailing", False)


@dataclass
class Found:
    """What was found while one chunk went through; it counts once all of the chunk is.

    Attributes:
        length: of the chunk.
        queries: its last, where they are among the last that are observed.
        opening: its first, where they are among the first that are observed.
        query_sq_sum: as the reader's, this chunk's queries counted too.
        sums: attention that entries of a head group got, where it is added up.
    """

    length: int
    queries: Tensor | None
    opening: Tensor | None
    query_sq_sum: Tensor | None
    sums: list[tuple[KVHeadGroup, Tensor]] = field(default_factory=list)


class LayerPrefill:
    """Runs one layer over the new tokens chunk by chunk, keeping its keys, values and the last
    queries. A chunk that was not got through, because memory ran out, may be taken once more.

    Attributes:
        layer: everything read so far; written in place.
        found: of the chunk that goes through now.
        query_sq_sum: squares of all queries, summed, `(batch, KV heads, dim)` float32; None if
            nobody asked.
        states: of the recurrent layers that run with it, after the chunks that went through.
        carrier: of these, while a chunk goes through.
    """

    def __init__(
        self,
        layer: LayerCache,
        policy: LayerPolicy,
        positions: Tensor,
        end: int,
        rotation: Rotation,
        sparse_mask: SparseAttentionMask | None = None,
        measures: bool = False,
        states: States | None = None,
        log: QueryLog | None = None,
        lenders: "Mapping[int, LayerPrefill] | None" = None,
        structural: Tensor | None = None,
        in_tiles: bool = False,
    ) -> None:
        """Read tokens into a layer that has room for them, or for a chunk of them under a mask.

        Args:
            positions: theirs, `(n,)` int32, ascending.
            end: the position after the last.
            rotation: of these positions.
            sparse_mask: how the layer sees, if not everything that it holds.
            measures: whether `query_sq_sum` is asked for.
            states: before these tokens.
            log: takes the queries, where somebody watches the layer.
            lenders: earlier layers, by number, whose entries are attended to behind this one.
            structural: as in `LayerView`.
            in_tiles: as of `Softmax`.
        """
        method = policy.method
        self.layer = layer
        self.policy = policy
        self.positions = positions
        self.end = end
        self.rotation = rotation
        self.sparse_mask = sparse_mask
        self.done = 0
        self.observed = max(method.needs.num_queries(policy.budget), method.decoding.rows)
        self.queries: list[Tensor] = []
        self.opening: list[Tensor] = []
        self.query_sq_sum = torch.zeros((), device=positions.device) if measures else None
        self.answers = True  # else keys, values and queries are wanted alone
        self.found: Found | None = None
        self.kv_heads = 0
        self.softmax = Softmax(1.0)  # until the first chunk
        self.states = states or {}
        self.carrier = StateCarrier(self.states)
        self.log = log
        self.lenders = lenders or {}
        self.structural, self.in_tiles = structural, in_tiles
        self.length = 0  # of the chunk that goes through

    def take(self, module: Any, hidden: Tensor, *, answers: bool = True) -> Tensor:
        """Put the next chunk through a decoder layer, as `through` does, or leave everything as it
        was."""
        self.answers = answers = answers or trails(module)
        self.length = length = hidden.shape[1]
        positions = self.positions[self.done : self.done + length]
        rotation = self._rotation(self.done, length)
        if self.sparse_mask is not None:
            make_room(self.layer, self.sparse_mask.mask, length)
        before = [head_group.used for head_group in self.layer.head_groups]
        try:
            out = through(module, hidden, positions, rotation, self, answers=answers)
        except BaseException:
            for head_group, used in zip(self.layer.head_groups, before, strict=True):
                head_group.used = used
            self.found, self.carrier = None, StateCarrier(self.states)
            raise
        self.count()
        return out

    def count(self) -> None:
        """Let the chunk that went through be one of those before the next; allocates nothing."""
        found, self.found = self.found, None
        assert found is not None
        if found.queries is not None:
            self.queries.append(found.queries)
        if found.opening is not None:
            self.opening.append(found.opening)
        for head_group, sums in found.sums:
            head_group.add(sums)
        self.query_sq_sum = found.query_sq_sum
        self.states = self.carrier.after
        self.carrier = StateCarrier(self.states)
        self.done += found.length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """One chunk, to be followed by `count`: over all earlier entries freely, over itself
        causally; without `answers` the result means nothing."""
        softmax = replace(softmax, in_tiles=self.in_tiles)
        self.kv_heads, self.softmax = k.shape[1], softmax
        self.found = self._found(q)
        if self.log is not None:
            self.log.write(self.positions[self.done : self.done + q.shape[2]], q, softmax)
        return over_head_groups(self.layer, q, k, v, softmax, self._over_head_group)

    def _found(self, q: Tensor) -> Found:
        """What a chunk's queries tell."""
        length, queries, opening = q.shape[2], None, None
        query_sq_sum = self.query_sq_sum
        if query_sq_sum is not None:
            query_sq_sum = query_sq_sum + grouped(q, self.kv_heads).float().square().sum(3).mean(2)
        after = self.positions.shape[0] - self.done - length
        wanted = max(0, min(length, self.observed - after))
        if wanted or not after:
            queries = q[:, :, length - wanted :].clone()
        missing = self.policy.method.needs.first - sum(each.shape[2] for each in self.opening)
        if missing > 0:
            opening = q[:, :, :missing].clone()
        return Found(length, queries, opening, query_sq_sum)

    def _over_head_group(
        self, head_group: KVHeadGroup, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        head_group.append(k, v, self.positions[self.done : self.done + q.shape[2]])
        if not self.answers:
            return q
        assert self.found is not None
        cumulative = self.policy.method.decoding.cumulative
        add = self.found.sums.append if cumulative else None
        return self._over_entries(head_group, q, softmax, self.done, add)

    def lender(self, index: int) -> Lender:
        """What attends to the entries of layer `index`, for the chunk that goes through."""
        source, at = self.lenders.get(index, self), self.done
        return Lender(source._rotation(at, self.length), partial(source._lend, at))

    def _lend(self, at: int, q: Tensor, softmax: Softmax) -> Tensor:
        """Attention of the tokens from row `at` on, which are in the layer already."""
        over = partial(self._over_entries, at=at)
        return over_what_is_held(self.layer, q, softmax, over)

    def _over_entries(
        self,
        head_group: KVHeadGroup,
        q: Tensor,
        softmax: Softmax,
        at: int,
        add: Callable[[tuple[KVHeadGroup, Tensor]], None] | None = None,
    ) -> Tensor:
        """Attention of the tokens from row `at` on, up to these; `add` takes its sums."""
        used = head_group.used - max(0, self.done - at - q.shape[2])
        first = self.end - self.positions.shape[0] + at
        keys, values = head_group.keys[:, :, :used], head_group.values[:, :, :used]
        window = self.policy.window
        if window is not None and used > window.visible(first + q.shape[2] - 1):
            return self._over_window(window, head_group, q, used - q.shape[2], first, softmax)
        vertical_slash = self.policy.method.prefilling.columns
        if self.sparse_mask is not None:
            own = self._rotation(at, q.shape[2])
            return self.sparse_mask.attend(q, keys, values, first, own, softmax)
        if vertical_slash is not None:
            positions = head_group.positions[..., :used]
            seen = attend_vertical_slash(q, keys, values, positions, first, vertical_slash, softmax)
            if seen is not None:
                return seen
        out, lse = softmax.with_sinks(*attend_causal(q, keys, values, softmax))
        if add is not None:
            add((head_group, attention_sums(q, keys, lse, softmax)))
        return out

    def _rotation(self, at: int, length: int) -> Rotation:
        """Of `length` tokens from row `at` on."""
        cos, sin = self.rotation
        return cos[:, at : at + length], sin[:, at : at + length]

    def _over_window(
        self,
        window: LocalWindow,
        head_group: KVHeadGroup,
        q: Tensor,
        before: int,
        position: int,
        softmax: Softmax,
    ) -> Tensor:
        """Attention of rows from a position on, behind `before` entries: a band, cut into blocks of
        rows so that each mask is about window x window."""
        outs = []
        positions = head_group.positions[
            0, 0
        ]  # a window holds the same for every head and sequence
        block = max(window.size, 256)
        for first in range(0, q.shape[2], block):
            rows = q[:, :, first : first + block]
            low = max(0, before + first + 1 - window.visible(position + first))
            high = before + first + rows.shape[2]
            i, j = positions[before + first : high, None], positions[low:high]
            outs.append(
                attend_masked(
                    rows,
                    head_group.keys[:, :, low:high],
                    head_group.values[:, :, low:high],
                    window.sees(i, j),
                    softmax,
                )
            )
        return torch.cat(outs, 2)

    def view(self, index: int, backend: ScoringBackend = ON_DEVICE) -> LayerView:
        """What a method is shown of the layer, the `index`-th, once all chunks went through.

        Args:
            backend: where attention becomes a choice.
        """
        queries = torch.cat(self.queries, 2)
        start = self.end - queries.shape[2]
        window = Window(queries, start, self.kv_heads, self.softmax, backend)
        begin, opening = self.end - self.positions.shape[0], None
        if self.opening:
            first = torch.cat(self.opening, 2)
            opening = Window(first, begin, self.kv_heads, self.softmax)
        return LayerView(
            index,
            self.layer.head_groups,
            window,
            self.policy.budget,
            opening=opening,
            structural=self.structural,
        )
