"""MiniCache: neighboring layers share the directions of their keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from kvlite.cache.bits import KVBits
from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Across, MergePairs, Segments
from kvlite.methods.scores import top
from kvlite.methods.types import KVHeadGroup, Selection, Tensor
from kvlite.model.window import LocalWindow

if TYPE_CHECKING:
    from kvlite.cache.pair import Merged, Pair

SMALLEST = 1e-6


@dataclass(frozen=True)
class MiniCache(Method):
    """Merges pairs of neighboring layers in the upper half: both layers share one direction for
    each token's key (and value), and each keeps its own magnitude. No token is dropped; those whose
    two directions differ most stay exact.

    New entries are left alone while they are within the budget; once they exceed it, all of them
    are merged.

    Attributes:
        start: the depth where pairs begin, from 0 (the first layer) to 1 (none).
        t: the shared direction, from 0 (the lower layer's) to 1 (the upper layer's).
        retain: share of each head's tokens that stay exact.
    """

    name = "minicache"
    summary = "merges the upper layers in pairs"
    paper = (
        "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models, section 4"
    )

    start: float = 0.5
    t: float = 0.6
    retain: float = 0.05

    respects_budget = False  # every token stays

    def __post_init__(self) -> None:
        for option in self.defaults():
            self.require(option, 0 <= getattr(self, option) <= 1, "from 0 to 1")

    @cached_property
    def across(self) -> Across:
        return Across(merging=MergePairs(self.pairs, self.merge))

    def pairs(self, windows: Sequence[LocalWindow | None]) -> list[tuple[int, int]]:
        """Neighbouring layers from `start` up; the last one may be left over."""
        pairs, lower = [], int(self.start * len(windows))
        while lower + 1 < len(windows):
            whole = windows[lower] is None and windows[lower + 1] is None
            if whole:
                pairs.append((lower, lower + 1))
            lower += 2 if whole else 1
        return pairs

    def select(self, view: LayerView) -> list[Selection]:
        return view.keep_all()

    def merge(
        self,
        lower: Sequence[KVHeadGroup],
        upper: Sequence[KVHeadGroup],
        bits: KVBits | None = None,
    ) -> Segments:
        """What was merged before, followed by what was not; none if an earlier turn, by another
        method, left the two layers with different tokens."""
        head_groups = list(zip(lower, upper, strict=False))
        if len(lower) != len(upper) or not all(_alike(*each) for each in head_groups):
            return []
        return [self._merged(*each, bits) for each in head_groups]

    def _merged(self, lower: KVHeadGroup, upper: KVHeadGroup, bits: KVBits | None) -> "Pair":
        from kvlite.cache.pair import Half, joined, packed_directions

        own = slice(0, lower.residual_len)
        keys = self._shared(lower.residual_keys[:, :, own], upper.residual_keys[:, :, own])
        if bits is not None:
            keys = packed_directions(keys, bits.of_values.vectors, bits.keys, bits.group)
        values = keys
        if not lower.latent:
            pair = lower.residual_values[:, :, own], upper.residual_values[:, :, own]
            values = self._shared(*pair)
            if bits is not None:
                values = packed_directions(values, bits.of_values.vectors, bits.values, bits.group)
        positions = lower.residual_positions[:, :, own].clone()
        new = (Half(keys[0], values[0], positions), Half(keys[1], values[1], positions))
        before = _pair(lower, upper)
        return new if before is None else joined(before, new)

    def _shared(self, lower: Tensor, upper: Tensor) -> "tuple[Merged, Merged]":
        """Keys or values `(batch, heads, n, dim)` of two layers, a head at a time, so that the
        float32 copies stay small."""
        import torch

        from kvlite.cache.head_group import wide
        from kvlite.cache.pair import Merged
        from kvlite.cache.segment import Exact

        units = lower.new_empty(lower.shape)
        angles = torch.empty(lower.shape[:3], device=lower.device)
        magnitudes = [units.new_empty(lower.shape[:3]) for _ in range(2)]
        for head in range(lower.shape[1]):
            below, above = lower[:, head].float(), upper[:, head].float()
            units[:, head], angles[:, head] = between(below, above, self.t)
            magnitudes[0][:, head], magnitudes[1][:, head] = below.norm(dim=-1), above.norm(dim=-1)
        slots = top(angles, ceil(self.retain * lower.shape[2] - 1e-9))
        place = wide(slots, lower)
        shared, retained = Exact(units), slots.to(torch.int32)
        first, second = (
            Merged(shared, retained, own, each.gather(2, place))
            for own, each in zip(magnitudes, (lower, upper), strict=True)
        )
        return first, second


def between(first: Tensor, second: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Spherical interpolation of the directions of two vectors, section 4.2; straight where they
    are parallel.

    Args:
        first, second: `(..., dim)` float32.
        t: 0 for the first's direction, 1 for the second's.

    Returns:
        Unit vectors `(..., dim)`, and the angles between the two `(...)` in radians.
    """
    import torch
    import torch.nn.functional as F

    one, two = (F.normalize(each, dim=-1, eps=SMALLEST) for each in (first, second))
    angle = (one * two).sum(-1).clamp(-1, 1).acos()
    sine = angle.sin()
    parallel = sine <= SMALLEST
    near = torch.where(parallel, 1 - t, ((1 - t) * angle).sin() / sine)
    far = torch.where(parallel, t, (t * angle).sin() / sine)
    mixed = near[..., None] * one + far[..., None] * two
    return F.normalize(mixed, dim=-1, eps=SMALLEST), angle


def _pair(lower: KVHeadGroup, upper: KVHeadGroup) -> "Pair | None":
    """What the two layers merged before, if anything."""
    from kvlite.cache.pair import Half

    below, above = lower.segment, upper.segment
    if isinstance(below, Half) and isinstance(above, Half) and below.shares_with(above):
        return below, above
    return None


def _alike(lower: KVHeadGroup, upper: KVHeadGroup) -> bool:
    """Whether two head groups hold the same tokens of the same heads, merged or not."""
    if lower.heads != upper.heads or lower.used != upper.used:
        return False
    merged = lower.segment is not None or upper.segment is not None
    if merged and _pair(lower, upper) is None:
        return False
    own = slice(0, lower.residual_len)
    return lower.residual_positions[:, :, own].equal(upper.residual_positions[:, :, own])
