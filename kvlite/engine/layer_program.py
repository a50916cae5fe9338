"""A layer of a step that is a program: a token is written and attends by device tensors alone."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache
from kvlite.cache.query_log import QueryLog
from kvlite.cache.recurrent import StateCarrier, States
from kvlite.engine.implementations import implementation_for
from kvlite.engine.quantized_attention import DeviceFill, attend_segment
from kvlite.engine.sparse_attention import SparseAttentionMask
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.attention_interface import Lender
from kvlite.model.rotary import Rotation
from kvlite.offload.kv.recall_program import RecallClock, RecallProgram
from kvlite.ops.attention import attend_ragged, grouped
from kvlite.ops.softmax import Softmax


class LayerProgram:
    """One layer of a program; a token is appended to each of its head groups or, where that is
    full, overwrites an entry.

    Attributes:
        layer: whose storage it writes to.
        recall: what it recalls, if it does.
        evicts: of each head group whether it is full, so that each token overwrites an entry.
        mask: what a token sees of it, if not everything.
        rotation: of the token.
        slots: where each KV head's entry of the token is appended, `(heads,)` int64.
        last: the slot of each KV head that is filled last, once the token is written.
        log: takes the queries, where somebody watches the layer.
        carrier: of the states of the recurrent layers that run with it, which stay where they are.
        implementation: of attention in the layer.
        lenders: the layers of the program, by number, whose entries are attended to behind this
            one.
        writes: whether tokens are written; else they are only attended with.
    """

    def __init__(
        self,
        index: int,
        layer: LayerCache,
        policy: LayerPolicy,
        mask: SparseAttentionMask | None,
        position: Tensor,
        seen: int,
        clock: RecallClock | None,
        log: QueryLog | None = None,
        states: States | None = None,
        lenders: "Mapping[int, LayerProgram] | None" = None,
    ) -> None:
        self.layer, self.policy, self.position = layer, policy, position
        self.mask, self.seen, self.writes = mask, seen, True
        self.rotation: Rotation | None = None
        self.log = log
        self.carrier = StateCarrier(states or {})
        self.lenders = lenders or {}
        self.implementation = implementation_for(layer.keys)
        groups, device = layer.head_groups, position.device
        self.heads = heads = [head for group in groups for head in group.heads]
        capacities = [group.residual_keys.shape[2] for group in groups for _ in group.heads]
        used = [group.residual_len for group in groups for _ in group.heads]
        starts = [sum(capacities[:index]) for index in range(len(heads))]
        self.longest = max(capacities)
        self.evicts = [not group.room for group in groups]
        self.recall = None
        if clock is not None and clock.recall.store.layers[index].index is not None:
            self.recall = RecallProgram(clock, index, layer, self.evicts)
        self.remembers = policy.remembers(layer)
        self.segmented = any(group.segment is not None for group in groups)
        if self.segmented or self.remembers:
            for group in groups:  # weights of 0 do not make nothing of what is no number
                group.residual_values[:, :, group.residual_len :] = 0

        def on_device(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, device=device)

        self.starts = on_device(starts)
        # Where the token at position 0 would have been appended.
        self.first = self.slots = self.last = on_device(
            [at + n - seen for at, n in zip(starts, used, strict=True)]
        )
        self.ends = on_device([at + n - 1 for at, n in zip(starts, capacities, strict=True)])
        self.full = on_device([evicts for group, evicts in self._groups for _ in group.heads])
        self.oldest_row = groups[0].history_index + 1 - seen
        self.packed = [
            on_device([group.segment_len]) if group.spare and not evicts else None
            for group, evicts in self._groups
        ]
        for group in groups:
            if group.storage is not None:  # free places, too, are looked at
                group.storage.clear(slice(group.segment_len, None))
        self._packed = [group.segment_len for group in groups]
        # Storage has heads in an order of its own, and those with an alias not at all.
        every, alias = layer.kv_heads, layer.head_alias
        self.order = None if heads == list(range(every)) else on_device(heads)
        taken = [heads.index(alias.get(head, head)) for head in range(every)]
        self.back = None if self.order is None else on_device(taken)

    @property
    def _groups(self) -> Iterator[tuple[KVHeadGroup, bool]]:
        return zip(self.layer.head_groups, self.evicts, strict=True)

    @property
    def changes(self) -> bool:
        """Whether a token changes more than slots that are free."""
        recalls = self.recall is not None and bool(self.recall.reached)
        return any(self.evicts) or recalls or bool(self.carrier.before)

    @property
    def room(self) -> int | None:
        """Tokens that can still go through; None if any number can."""
        groups, trims = self.layer.head_groups, self.policy.method.decoding.trim is not None
        rooms = [group.room for group, evicts in self._groups if not evicts]
        if trims:
            rooms += [self.policy.budget - group.used for group in groups]
        if self.recall is not None:
            rooms.append(self.recall.room)
        return min(rooms, default=None)

    @property
    def free(self) -> int:
        """Tokens that can go through before anything is quantized; at least one if all overwrite
        others."""
        return min((group.free for group, evicts in self._groups if not evicts), default=1)

    def follow(self) -> None:
        """Let the device know what was quantized since the last token."""
        firsts = self._split(self.first, 0)
        for number, group in enumerate(self.layer.head_groups):
            packed, more = self.packed[number], group.segment_len - self._packed[number]
            if packed is not None and more:
                packed += more
                firsts[number].sub_(more)
                self._packed[number] += more
                if self.recall is not None:
                    self.recall.mark_free(group)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """As `model.attention_interface.Attender`, for one token of one sequence."""
        if self.log is not None and self.writes:
            self.log.write(self.position, q, softmax)
        queries = grouped(q, k.shape[1])[:, :, :, 0]
        scores, scale = None, softmax.scale
        if self.recall is not None:
            scores = self.recall.tell(k, v, queries, scale)
        if self.order is not None:
            k, v = (each.index_select(1, self.order) for each in (k, v))
        self.last = self._written(k, v)
        if scores is not None:
            self._recalled(self._ordered(queries), scale, scores)
        return self._over_entries(q, softmax, self.remembers)

    def lender(self, index: int) -> Lender:
        """What attends to the entries of layer `index`, which has the token already."""
        source = self.lenders.get(index, self)
        assert source.rotation is not None
        return Lender(source.rotation, partial(source._over_entries, remembers=False))

    def _over_entries(self, q: Tensor, softmax: Softmax, remembers: bool) -> Tensor:
        """Attention to what the layer holds."""
        every = self.layer.kv_heads
        queries = self._ordered(grouped(q, every)[:, :, :, 0])
        if self.order is not None:
            softmax = softmax.of_heads(self.heads, every)
        if self.segmented or self.mask is not None:
            out = self._by_group(queries, softmax, remembers)
        else:
            out = self._at_once(queries, softmax, remembers)
        if self.back is not None:
            out = out.index_select(1, self.back)
        return out.flatten(1, 2)[:, :, None]

    def _ordered(self, queries: Tensor) -> Tensor:
        """Queries of KV heads, in the order of the storage."""
        return queries if self.order is None else queries.index_select(1, self.order)

    def _written(self, k: Tensor, v: Tensor) -> Tensor:
        """Append the token to head groups with room, and let it overwrite an entry of others; the
        last slot of each KV head."""
        if not any(self.evicts):
            if self.writes:
                self.layer.write(self.slots, k, v, self.position)
            return self.slots
        evict, budget = self.policy.method.decoding.evict, self.policy.budget
        assert evict is not None
        last = torch.where(self.full, self.ends, self.slots)
        chosen = [
            evict(group, budget, self.position) if evicts else None
            for group, evicts in self._groups
        ]
        if not self.writes:
            return last
        groups, appended = self.layer.head_groups, self._split(self.slots, 0)
        if self.segmented:
            every = zip(groups, chosen, appended, self._split(k, 1), self._split(v, 1), strict=True)
            for group, own, slots, keys, values in every:
                if own is None:
                    self.layer.write(slots, keys, values, self.position)
                else:
                    group.overwrite(own, keys, values, self.position)
            return last
        starts = self._split(self.starts, 0)
        by_group = [
            slots if own is None else own[0] + start
            for own, slots, start in zip(chosen, appended, starts, strict=True)
        ]
        self.layer.write(torch.cat(by_group), k, v, self.position)
        for group, own in zip(groups, chosen, strict=True):
            if group.rows is not None and own is not None:
                gone = own[:, :, None, None].expand(-1, -1, group.rows.shape[2], -1)
                group.rows.scatter_(3, gone, 0.0)
        return last

    def _recalled(self, queries: Tensor, scale: float, scores: Tensor) -> None:
        """Bring back what the token wants most of what scores `(batch, all KV heads, n)`."""
        assert self.recall is not None
        every = zip(self.layer.head_groups, self.packed, self._split(queries, 1), strict=True)
        for group, packed, own in every:
            if any(group is each for each in self.recall.reached):
                self.recall.bring_back(group, packed, own, scale, scores, writes=self.writes)

    def _at_once(self, queries: Tensor, softmax: Softmax, remembers: bool) -> Tensor:
        """Attention of all KV heads, whose entries lie in the layer's own slots."""
        keys, values, weights = self.layer.keys, self.layer.values, None
        if remembers:
            weights = queries.new_empty(keys.shape[:2], dtype=torch.float32)
        runs = self.starts, self.last, self.longest
        out = attend_ragged(queries, keys, values, *runs, softmax, weights)
        if weights is not None and self.writes:
            groups = self.layer.head_groups
            sizes = [len(group.heads) * group.residual_keys.shape[2] for group in groups]
            for group, own in zip(groups, weights.split(sizes, 1), strict=True):
                self._remember(group, own.view(len(own), len(group.heads), -1))
        return out

    def _by_group(self, queries: Tensor, softmax: Softmax, remembers: bool) -> Tensor:
        """Attention over head groups that have segments, or are seen in part."""
        outs, first = [], 0
        every = zip(self._groups, self.packed, self._split(queries, 1), strict=True)
        for (group, evicts), packed, asked in every:
            heads = slice(first, first := first + len(group.heads))
            own = softmax.of_heads(range(heads.start, heads.stop), len(self.heads))
            q = asked.flatten(1, 2)[:, :, None]
            if self.mask is not None and self.rotation is not None:
                seen = group.keys, group.values, self.seen, self.rotation
                outs.append(self.mask.attend(q, *seen, own).view_as(asked))
                continue
            end = self.last[heads][0] - self.starts[heads][0]
            fill = None if evicts else DeviceFill(end, packed)
            given = q, group, own, self.implementation.segment
            out, row = attend_segment(*given, remembers=remembers, fill=fill)
            outs.append(out.view_as(asked))
            if self.writes and row is not None:
                self._remember(group, row)
        return torch.cat(outs, 1)

    def keep_states(self) -> None:
        """Let the states after the token be those before the next one, if it `writes`."""
        if not self.writes:
            return
        for place, before in self.carrier.before.items():
            before.take(self.carrier.after[place])

    def _remember(self, group: KVHeadGroup, row: Tensor) -> None:
        """Add an attention row, `(batch, heads, capacity)`, to what a head group remembers."""
        assert group.rows is not None
        if self.policy.method.decoding.cumulative:
            group.rows[:, :, 0].add_(row)
        else:
            newest = (self.position + self.oldest_row) % group.rows.shape[2]
            group.rows.index_copy_(2, newest, row[:, :, None])

    def _split(self, each: Tensor, dim: int) -> tuple[Tensor, ...]:
        """What there is of KV heads, in the order of the storage, by head group."""
        return torch.split(each, [len(group.heads) for group in self.layer.head_groups], dim)

    def advance(self, seen: int) -> None:
        """Count a token that was written, after `seen` others."""
        if self.recall is not None:
            self.recall.advance(seen)
        for group, evicts in self._groups:
            if not evicts:
                group.used += 1
            if self.remembers and not self.policy.method.decoding.cumulative:
                assert group.rows is not None
                group.history_index = (group.history_index + 1) % group.rows.shape[2]
