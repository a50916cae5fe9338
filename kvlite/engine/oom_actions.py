"""What a cache can give up, in place, when memory runs out: bits and entries.

Layers are made smaller one at a time, so that this itself needs little memory; a layer for which
even that is missing stays as it is.
"""

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from kvlite.cache import KVBits, KVCache, KVHeadGroup, LayerCache, Selection
from kvlite.memory.free import is_oom
from kvlite.memory.oom import BUDGET, EIGHT_BITS, FOUR_BITS, STREAM, OOMActions
from kvlite.methods.layer_policy import LEAST_ROOM, PROVISION, LayerPolicy
from kvlite.model.load import LoadedModel
from kvlite.model.shape import ModelShape
from kvlite.offload.weights.layers import stream_from_memory

# What stays whatever is given up: the first entries, on which much attention rests, and a few more.
SINKS, LEAST = 4, 16


@dataclass(frozen=True)
class ReducibleLayers:
    """Layers that can be replaced by smaller ones.

    Attributes:
        layers: of the model, as far as there are any.
        fixed: indices of those that must stay as they are.
        uncut: of those that must keep all their entries.
    """

    layers: MutableSequence[LayerCache]
    fixed: frozenset[int] = frozenset()
    uncut: frozenset[int] = frozenset()


@dataclass(frozen=True)
class OOMState:
    """All that a cache holds, and the policies that say what it will.

    Attributes:
        seen: tokens read; no more than that can be held.
    """

    shape: ModelShape
    reducible: Sequence[ReducibleLayers]
    policies: MutableSequence[LayerPolicy]
    seen: int

    def round_to(self, width: int) -> bool:
        """Quantize what is held, and let the policies quantize what comes.

        Args:
            width: bits a number; what has no more already stays as it is.

        Returns:
            Whether that makes anything smaller, now or later.
        """
        bits = KVBits(width, width)
        lengths = [n for held in self.reducible for layer in held.layers for _, n in layer.lengths]
        lengths += [min(policy.budget, self.seen) for policy in self.policies]
        able = all(_may_be_quantized(policy, bits) for policy in self.policies)
        uneven = any(size.dim * width % 8 for size in self.shape.kv_sizes)
        if not able or uneven or not any(map(bits.packed, lengths)):
            return False
        for index, policy in enumerate(self.policies):
            self.policies[index] = replace(policy, bits=bits)
        self._each_smaller(
            lambda index, layer: _quantized(layer, self.policies[index], bits), cuts=False
        )
        return True

    def halve(self) -> bool:
        """Give every layer that drops entries half of its budget, and cut what is held to that.

        What is cut already is cut by what head groups remember of attention, or to its first few
        entries and the most recent ones.

        Returns:
            Whether any budget was still large enough.
        """
        shares: dict[int, float] = {}
        for index, policy in enumerate(self.policies):
            budget = min(policy.budget, self.seen)
            less = max(budget // 2, policy.method.min_budget, LEAST)
            if less < budget and _may_be_cut(policy):
                candidate_budget = None if policy.candidate_budget is None else PROVISION * less
                self.policies[index] = replace(
                    policy, budget=less, candidate_budget=candidate_budget
                )
                shares[index] = less / budget
        self._each_smaller(
            lambda index, layer: (
                _shortened(layer, self.policies[index], shares[index]) if index in shares else None
            ),
            cuts=True,
        )
        return bool(shares)

    def _each_smaller(
        self, smaller: Callable[[int, LayerCache], LayerCache | None], *, cuts: bool
    ) -> None:
        """Put something smaller in the place of layers. What one gives back may be what it takes to
        make another smaller, so those for which there was no memory are tried again.

        Args:
            cuts: whether it has fewer entries.
        """
        waiting = [
            (held.layers, index)
            for held in self.reducible
            for index in range(len(held.layers))
            if index not in held.fixed and not (cuts and index in held.uncut)
        ]
        done: set[int] = set()
        before = len(waiting) + 1
        while len(waiting) < before:
            before, again = len(waiting), []
            for layers, index in waiting:
                layer = layers[index]
                if id(layer) in done:
                    continue
                try:
                    made = smaller(index, layer)
                except Exception as error:
                    if not is_oom(error):
                        raise
                    again.append((layers, index))
                    continue
                if made is not None:
                    done.add(id(made))
                    self._put(index, layer, made)
                del layer, made
            waiting = again

    def _put(self, index: int, layer: LayerCache, made: LayerCache) -> None:
        """Put one layer in the place of another, wherever that is."""
        for held in self.reducible:
            if index < len(held.layers) and held.layers[index] is layer:
                held.layers[index] = made


def oom_actions(model: LoadedModel, oom_state: Callable[[], OOMState]) -> OOMActions:
    """What can be given up of what is held, whatever is done with it.

    Args:
        oom_state: as they are when they are asked for.
    """
    return {
        EIGHT_BITS: lambda: oom_state().round_to(8),
        FOUR_BITS: lambda: oom_state().round_to(4),
        BUDGET: lambda: oom_state().halve(),
        STREAM: lambda: stream_from_memory(model),
    }


def cache_oom_actions(
    model: LoadedModel, cache: KVCache, policies: MutableSequence[LayerPolicy], new: int = 0
) -> OOMActions:
    """What can be given up while answering, or before `new` tokens are read."""
    reducible = [ReducibleLayers(cache.layers)]
    return oom_actions(model, lambda: OOMState(model.shape, reducible, policies, cache.seen + new))


def _may_be_quantized(policy: LayerPolicy, bits: KVBits) -> bool:
    held = policy.bits
    return held is None or (held.together == 1 and min(held.keys, held.values) > bits.keys)


def _quantized(layer: LayerCache, policy: LayerPolicy, bits: KVBits) -> LayerCache | None:
    """A layer in fewer bits; None where it waits for others or is merged with one, its heads share
    keys, or there is too little of it."""
    if (
        policy.quantize_now is None
        or layer.computed
        or layer.shares_keys
        or not any(bits.packed(n) for _, n in layer.lengths)
    ):
        return None
    return layer.resized(
        [head_group.capacity for head_group in layer.head_groups], layer.rows, bits
    )


def _may_be_cut(policy: LayerPolicy) -> bool:
    """Whether a layer's entries are dropped one by one, and no token's sight depends on it."""
    method = policy.method
    sees_all = policy.window is None and policy.mask is None
    return sees_all and method.compresses and method.across.merging is None


def _shortened(layer: LayerCache, policy: LayerPolicy, share: float) -> LayerCache | None:
    """A layer that keeps a share of each line; None where it will be cut later."""
    if policy.candidate_budget is not None or layer.computed or layer.shares_keys:
        return None
    selections = [
        kept(head_group, max(LEAST, ceil(share * head_group.used)))
        for head_group in layer.head_groups
    ]
    sizes = policy.capacities([each.length for each in selections], LEAST_ROOM)
    return LayerCache.gathered(selections, sizes, layer.rows, bits=policy.quantize_now)


def kept(head_group: KVHeadGroup, count: int) -> Selection:
    """The `count` entries of a head group that stay, ascending in position."""
    if head_group.used <= count:
        return Selection.everything(head_group)
    positions = head_group.positions[:, :, : head_group.used]
    order = positions.argsort(dim=-1)
    best = _worth(head_group, order).topk(count, dim=-1).indices
    return Selection(head_group, order.gather(2, best.sort(dim=-1).values))


def _worth(head_group: KVHeadGroup, order: Tensor) -> Tensor:
    """What entries are worth, in an order: remembered attention, or else how late they come; the
    first few, and the half of the line that comes last where attention counts, are worth most."""
    late = torch.arange(head_group.used, device=order.device).expand(order.shape)
    if head_group.rows is None:
        worth = late.float()
    else:
        worth = head_group.scores().gather(2, order)
        worth = worth.masked_fill(late >= head_group.used - LEAST // 2, torch.inf)
    return worth.masked_fill(late < SINKS, torch.inf)
