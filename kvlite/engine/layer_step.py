"""One layer of a decode step: new tokens are written into it, and attend to all that it holds."""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache, Selection
from kvlite.cache.query_log import QueryLog
from kvlite.cache.recurrent import StateCarrier, States, StatesAhead
from kvlite.engine import compiled_rows
from kvlite.engine.heads import over_head_groups, over_what_is_held
from kvlite.engine.implementations import Implementation, implementation_for
from kvlite.engine.quantized_attention import attend_segment
from kvlite.engine.sparse_attention import SparseAttentionMask
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import LEAST_ROOM, ROOM, LayerPolicy
from kvlite.methods.scores import Window
from kvlite.model.attention_interface import Lender
from kvlite.model.rotary import Rotation
from kvlite.offload import Recall
from kvlite.ops.attention import attend, attend_causal, attend_with_rows, grouped
from kvlite.ops.heads import of_heads
from kvlite.ops.softmax import Softmax


class LayerStep:
    """Runs one layer over one new token per sequence, or over several of one sequence where the
    layer does no more than append them, and recall.

    Attributes:
        layer, policy: as they stand.
        positions: of the tokens, on the device, `(L,)` int32; `position` is the first one.
        again: whether an earlier attempt may have written the token over another entry already.
        attention: what head groups are to remember, once the token counts.
        held: with recall, before several tokens and after each, the positions in head groups.
        asked: what the method is to settle by, then.
        carrier: the states of the recurrent layers that run with it, before and after the tokens.
        lenders: layers of the step so far, by number, whose entries are attended to behind this
            one.
    """

    def __init__(
        self,
        index: int,
        layer: LayerCache,
        policy: LayerPolicy,
        position: int,
        rotation: Rotation,
        sparse_mask: SparseAttentionMask | None = None,
        recall: Recall | None = None,
        states: States | None = None,
        positions: Tensor | None = None,
        queries: QueryLog | None = None,
        lenders: "Mapping[int, LayerStep] | None" = None,
        *,
        again: bool = False,
    ) -> None:
        device = layer.keys.device
        if positions is None:
            positions = torch.full((1,), position, dtype=torch.int32, device=device)
        self.index = index
        self.layer = layer
        self.policy = policy
        self.position = position
        self.rotation = rotation
        self.sparse_mask = sparse_mask
        self.recall = recall
        self.queries = queries
        self.positions = positions
        self.again = again
        self.asked: Window | None = None
        carrier = StateCarrier if len(positions) == 1 else StatesAhead
        self.carrier = carrier(states or {})
        self.lenders = lenders or {}
        self.attention: list[tuple[KVHeadGroup, Tensor]] = []
        self.held: list[list[Tensor]] = []

    @functools.cached_property
    def implementation(self) -> Implementation:
        """That of attention in the layer."""
        return implementation_for(self.layer.keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Write the tokens into every head group, then attend over all of it."""
        if self.recall is not None and q.shape[2] > 1:
            return self._recalling(q, k, v, softmax)
        if compiled_rows.takes(self, q, k, v):
            return compiled_rows.attend([self], q, k, v, softmax)
        if self.queries is not None:
            self.queries.write(self.positions, q, softmax)
        recall = self.recall
        if recall is not None:
            recall.store.answer(self.index, k, v, self.position)

        queries, scale = grouped(q, k.shape[1])[:, :, :, 0], softmax.scale

        @functools.cache
        def scores() -> Tensor:
            assert recall is not None
            return recall.scores(self.index, queries, scale)

        def over(
            head_group: KVHeadGroup, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
        ) -> Tensor:
            self._write(head_group, k, v)
            if recall is not None and recall.reaches(self.index, head_group):
                own = of_heads(queries, head_group.heads)
                recall.bring_back(self.index, head_group, own, scores(), scale)
            return self._over_entries(head_group, q, softmax, self.policy.remembers(self.layer))

        out = over_head_groups(self.layer, q, k, v, softmax, over)
        if self.policy.method.across.resolves_at == "step":
            self.asked = Window(q, self.position, k.shape[1], softmax)
        return out

    def _recalling(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """One token after the other, as each recalls what it needs itself."""
        self.remember_held()
        outs = []
        for place in range(q.shape[2]):
            own = slice(place, place + 1)
            one = LayerStep(
                self.index,
                self.layer,
                self.policy,
                self.position + place,
                self.rotation,
                recall=self.recall,
                positions=self.positions[own],
                queries=self.queries,
            )
            outs.append(one.attend(q[:, :, own], k[:, :, own], v[:, :, own], softmax))
            self.remember_held()
        return torch.cat(outs, 2)

    def remember_held(self) -> None:
        """Write down the positions that head groups hold."""
        groups = self.layer.head_groups
        self.held.append([group.positions[:, :, : group.used].clone() for group in groups])

    def return_recalled(self, count: int) -> None:
        """Exchange what tokens behind the first `count` recalled for what was there before."""
        if self.recall is None or not self.held:
            return
        for head_group, held in zip(self.layer.head_groups, self.held[count], strict=True):
            self.recall.return_to(self.index, head_group, held)
        self.held = []

    def lender(self, index: int) -> Lender:
        """What attends to the entries of layer `index`."""
        source = self.lenders.get(index, self)
        return Lender(source.rotation, source._lend)

    def _lend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attention of the tokens, which are in the layer already."""
        over = functools.partial(self._over_entries, remembers=False)
        return over_what_is_held(self.layer, q, softmax, over)

    def _over_entries(
        self, head_group: KVHeadGroup, q: Tensor, softmax: Softmax, remembers: bool
    ) -> Tensor:
        """Attention to what a head group holds, for the policy to remember if it is to."""
        if head_group.segment is not None and self.sparse_mask is None:
            return self._over_segment(head_group, q, softmax, remembers)
        keys = head_group.keys[:, :, : head_group.used]
        values = head_group.values[:, :, : head_group.used]
        if self.sparse_mask is not None:
            own = self.rotation
            return self.sparse_mask.attend(q, keys, values, self.position, own, softmax)
        if q.shape[2] > 1:
            return softmax.with_sinks(*attend_causal(q, keys, values, softmax))[0]
        if not remembers:
            return softmax.with_sinks(*attend(q, keys, values, softmax, causal=False))[0]
        out, rows = attend_with_rows(q, keys, values, softmax)
        self.attention.append((head_group, rows[:, :, 0]))
        return out

    def _over_segment(
        self, head_group: KVHeadGroup, q: Tensor, softmax: Softmax, remembers: bool
    ) -> Tensor:
        """One token after the other, so that what is quantized is never whole."""
        end, outs = head_group.used, []
        for last, each in enumerate(q.split(1, 2), end - q.shape[2] + 1):
            head_group.used = last
            given = each, head_group, softmax, self.implementation.segment
            out, row = attend_segment(*given, remembers=remembers)
            outs.append(out)
            if remembers and row is not None:
                self.attention.append((head_group, row))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _write(self, head_group: KVHeadGroup, k: Tensor, v: Tensor) -> None:
        if self.again and self._written_over(head_group, k, v):
            return
        if head_group.room:
            head_group.append(k, v, self.positions)
            return
        evict = self.policy.method.decoding.evict
        assert evict is not None, "room was made in a head group that may grow"
        slots = evict(head_group, self.policy.budget, self.position)
        head_group.overwrite(slots, k, v, self.position)

    def _written_over(self, head_group: KVHeadGroup, k: Tensor, v: Tensor) -> bool:
        """Write the token where an earlier attempt let it take another entry's place, if any
        did."""
        positions = head_group.positions[:, :, : head_group.used]
        batch, heads, slots = (positions == self.position).nonzero().unbind(1)
        if not len(batch):
            return False
        own = k[batch, heads, 0], v[batch, heads, 0], self.positions.expand(len(batch))
        head_group.replace((batch, heads, slots), *own)
        return True

    def remember(self) -> None:
        """Let head groups remember the token's attention."""
        cumulative = self.policy.method.decoding.cumulative
        for head_group, row in self.attention:
            (head_group.add if cumulative else head_group.record)(row)
        self.attention = []

    def trimmed(self) -> LayerCache:
        """The layer after the step: smaller, in storage of its own, if the method cuts it now."""
        if self.asked is not None:
            self._settle(self.asked)
        decoding, head_groups = self.policy.method.decoding, self.layer.head_groups
        if decoding.trim is None:
            return self.layer
        kept = [decoding.trim(head_group, self.policy.budget) for head_group in head_groups]
        if all(slots is None for slots in kept):
            return self.layer
        selections = [
            Selection.everything(head_group) if slots is None else Selection(head_group, slots)
            for head_group, slots in zip(head_groups, kept, strict=True)
        ]
        sizes = self.policy.capacities([each.length for each in selections], LEAST_ROOM)
        bits = self.policy.quantize_now
        return LayerCache.gathered(selections, sizes, decoding.rows, bits=bits)

    def _settle(self, window: Window) -> None:
        """Let the method look at the layer, and cut what it now keeps less of."""
        layer = self.layer
        view = LayerView(self.index, layer.head_groups, window, self.policy.budget)
        policy = self.policy.settled(view)
        if policy.quantize_now is not None or not policy.keeps_all(view.lengths):
            layer = policy.cut(view, ROOM)
        self.policy, self.layer, self.asked = policy, layer, None
