"""How a tier stood at some moment, to which it can return."""

from dataclasses import dataclass, replace
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.cache.front import bytes_held
from kvlite.cache.packed import Packed
from kvlite.offload.kv.disk import Disk
from kvlite.offload.kv.store import Tier, TierLayer


@dataclass(frozen=True)
class _LayerMark:
    """How one layer's part stood: everything it had is still there, behind it came more.

    Attributes:
        read: entries.
        window: of a sliding window all that it had, since it drops what it will not see again.
        exact: in a tier that is quantized, keys, values and positions of what was not then.
        judged, judge, disk: as of `TierLayer`.
    """

    read: int
    window: LayerCache | None
    exact: tuple[Tensor, ...]
    judged: Tensor | None
    judge: str
    disk: Disk | None

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held for it."""
        return [*self.exact, *(self.window.tensors if self.window else ())]


class TierMark:
    """How a tier stood after it had read something."""

    def __init__(self, tier: Tier) -> None:
        tier.forget_answer()
        self._tier: ReferenceType[Tier] = ref(tier)
        self.seen = tier.seen
        self.bits = tier.bits
        self.layers = [_mark(layer, tier.bits is not None) for layer in tier.layers]

    @classmethod
    def at(cls, tier: Tier, seen: int) -> "TierMark":
        """How a tier stood when it had read that much, of which nothing had to be kept."""
        made = cls(tier)
        made.seen = seen
        made.layers = [replace(layer, read=seen) for layer in made.layers]
        return made

    @property
    def plain(self) -> bool:
        """Whether how much was read says all of it."""
        return all(
            layer.read == self.seen and layer.judged is None and not layer.tensors
            for layer in self.layers
        )

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it holds beside the tier."""
        return bytes_held(tensor for layer in self.layers for tensor in layer.tensors)

    def fits(self, tier: Tier | None) -> bool:
        """Whether a tier can return to it: it is the same one, and nothing was rounded anew."""
        if tier is None or self._tier() is not tier:
            return False
        pairs = zip(self.layers, tier.layers, strict=True)
        return all(mark.window is not None or self._holds(mark, layer) for mark, layer in pairs)

    def _holds(self, mark: _LayerMark, layer: TierLayer) -> bool:
        """Whether a layer still has what it had, as it had it."""
        front = layer.bank.front
        if not mark.exact:
            return front is None
        packed = mark.read - mark.exact[0].shape[2]
        if isinstance(front, Packed):
            return front.bits == self.bits and front.count >= packed
        return not packed

    def put_back(self, tier: Tier) -> None:
        """Let a tier that fits stand so again; what it read since is gone."""
        tier.forget_answer()
        pairs = list(zip(tier.layers, self.layers, strict=True))
        cut = [_cut(layer, mark) if mark.exact else None for layer, mark in pairs]
        # All that has to be allocated is.
        for (layer, mark), made in zip(pairs, cut, strict=True):
            if mark.window is not None:
                layer.cache, layer.disk = mark.window, mark.disk
            elif made is not None:
                layer.cache, layer.disk = made, None
            layer.read = layer.bank.used = mark.read
            layer.judged, layer.judge, layer.fresh = mark.judged, mark.judge, []
            if layer.index is not None:
                layer.index.used = mark.read
        tier.seen = self.seen


def mark_bytes(tier: Tier) -> int:
    """Bytes that a mark of how a tier stands would hold beside it: its `nbytes`, before it is
    made."""
    rounds = tier.bits is not None
    windows = (layer.cache.tensors for layer in tier.layers if layer.window is not None)
    exact = (_exact(layer, rounds) for layer in tier.layers)
    return bytes_held(tensor for each in windows for tensor in each) + sum(
        tensor.nbytes for each in exact for tensor in each
    )


def _mark(layer: TierLayer, rounds: bool) -> _LayerMark:
    window = None if layer.window is None else layer.cache
    exact = tuple(each.clone() for each in _exact(layer, rounds))
    return _LayerMark(layer.read, window, exact, layer.judged, layer.judge, layer.disk)


def _exact(layer: TierLayer, rounds: bool) -> tuple[Tensor, ...]:
    """What of a layer may be rounded yet, where it lies."""
    if layer.window is not None or not rounds:
        return ()
    bank = layer.bank
    own = (bank.own_keys, bank.own_values, bank.own_positions)
    return tuple(each[:, :, : bank.own_used] for each in own)


def _cut(layer: TierLayer, mark: _LayerMark) -> LayerCache:
    """A quantized layer's first entries: each was rounded once, so they are what they were."""
    bank, (keys, values, positions) = layer.bank, mark.exact
    count, heads, front = mark.read - keys.shape[2], [*range(len(bank.heads))], bank.front
    if isinstance(front, Packed):
        front = front.take(torch.arange(count).expand(*positions.shape[:2], -1), heads)
    cut = LayerCache(
        [(bank.heads, mark.read)],
        batch=keys.shape[0],
        dim=keys.shape[3],
        dtype=keys.dtype,
        device=keys.device,
        fronts=[front if count else None],
    )
    (made,) = cut.banks
    made.own_keys[:], made.own_values[:], made.own_positions[:] = keys, values, positions
    made.used = mark.read
    return cut
