"""Which entries of all that was read the cache holds, and which came back during an answer.

Two looks at a cache tell: one when the question has been read (at the first piece of an answer,
before its token enters the cache), and one when the answer has ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvlite.cache import KVCache, LayerCache
from kvlite.config.checked_file import sound
from kvlite.errors import SnapshotError

# Equal parts of what was seen, and cells of the whole map: with more its picture would be too large
# for a page.
BINS, CELLS = 240, 6000

Bits = NDArray[np.uint8]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Look:
    """What a cache held at one moment, as a bit for each KV head and position in host memory.

    Attributes:
        seen: positions there were.
        windows: for each layer, the size of its sliding window; None where it sees everything.
        heads: for each layer, its KV heads, those that share another's entries included.
        bits: for each layer, `(KV heads with entries of their own, ceil(seen / 8))` uint8.
    """

    seen: int
    windows: tuple[int | None, ...]
    heads: tuple[int, ...]
    bits: tuple[Bits, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(each.nbytes for each in self.bits)


@dataclass(frozen=True)
class KeptLayer:
    """What a layer holds, in whole per cent of (KV head, position) pairs.

    Attributes:
        window: the size of its sliding window; None where it sees everything.
        held: of each bin.
        back: of each bin, what came back during the answer; part of `held`.
        all_held, all_back: of all positions.
    """

    window: int | None
    held: tuple[int, ...]
    back: tuple[int, ...]
    all_held: int
    all_back: int


@dataclass(frozen=True)
class KeptMap:
    """What each layer holds of each part of what was seen.

    Attributes:
        seen: positions, the answer's included.
        read: positions before the answer.
        layers: all with the same bins.
    """

    seen: int
    read: int
    layers: tuple[KeptLayer, ...]

    @property
    def bins(self) -> int:
        """How many parts the positions are in."""
        return len(self.layers[0].held) if self.layers else 0

    @property
    def edges(self) -> list[int]:
        """Where bins begin, and the end: bin i has the positions edges[i] to edges[i + 1] - 1."""
        return _edges(self.seen, self.bins)

    def to_json(self) -> dict[str, Any]:
        """Plain values; equal bins are written as one number."""
        return {
            "seen": self.seen,
            "read": self.read,
            "bins": self.bins,
            "layers": [
                [each.window, each.all_held, each.all_back, _short(each.held), _short(each.back)]
                for each in self.layers
            ],
        }

    @classmethod
    def from_json(cls, plain: Any) -> "KeptMap":
        """The map that was stored; raises SnapshotError if it is damaged."""
        said = "this is not a map of what was kept, or a damaged one: answer again to make another"
        with sound(lambda _: SnapshotError(said)):
            bins = plain["bins"]
            layers = tuple(
                KeptLayer(window, _long(held, bins), _long(back, bins), all_held, all_back)
                for window, all_held, all_back, held, back in plain["layers"]
            )
            made = cls(plain["seen"], plain["read"], layers)
            made.require_sound()
            return made

    def require_sound(self) -> None:
        """Raises ValueError or TypeError if its numbers do not fit each other."""
        per_cent = [
            number
            for each in self.layers
            for number in (*each.held, *each.back, each.all_held, each.all_back)
        ]
        sizes = {len(cells) for each in self.layers for cells in (each.held, each.back)}
        if (
            not 0 <= self.read <= self.seen
            or not all(0 <= each <= 100 for each in per_cent)
            or sizes - {self.bins}
            or self.bins > self.seen
            or any(each.window is not None and each.window < 1 for each in self.layers)
        ):
            raise ValueError


def look(cache: KVCache, windows: Sequence[int | None]) -> Look:
    """Look at a cache, of several sequences at the first, and the windows of the model's shape.

    On a GPU it takes, one layer at a time, 9 bytes an entry and 2 a KV head and position, and may
    run out of memory."""
    seen, layers = cache.seen, cache.layers
    heads = tuple(layer.kv_heads for layer in layers)
    return Look(seen, tuple(windows), heads, tuple(_bits(each, seen) for each in layers))


def _bits(layer: LayerCache, seen: int) -> Bits:
    groups = []
    for head_group in layer.head_groups:
        at = head_group.positions[:1, :, : head_group.used].long()
        # One position more, for what an interrupted step left behind.
        held = torch.zeros(*at.shape[:2], seen + 1, dtype=torch.bool, device=at.device)
        groups.append(held.scatter_(2, at, True))
    return np.packbits(layer.in_order(groups)[0, :, :seen].cpu().numpy(), axis=1)


def kept_map(before: Look | None, after: Look, bins: int = BINS) -> KeptMap:
    """What each layer holds of equal parts of what was seen, `bins` at most, or fewer where there
    are many layers; `before` is None where nothing came back. Raises ValueError if the looks are
    not at one cache, one after the other."""
    before = before or after
    bins = min(bins, CELLS // (2 * max(1, len(after.heads))))
    edges = _edges(after.seen, min(bins, after.seen))
    counted = zip(after.windows, after.heads, _counts(before, after), strict=True)
    layers = []
    for window, heads, (held, back) in counted:
        pairs, whole = heads * np.diff(edges), np.array([heads * after.seen])
        layers.append(
            KeptLayer(
                window,
                _per_cent(_binned(held, edges), pairs),
                _per_cent(_binned(back, edges), pairs),
                *_per_cent(held.sum(keepdims=True), whole),
                *_per_cent(back.sum(keepdims=True), whole),
            )
        )
    return KeptMap(after.seen, before.seen, tuple(layers))


def _counts(before: Look, after: Look) -> Iterator[tuple[Counts, Counts]]:
    """For each layer, how many KV heads hold each position, and for how many of them it came back
    since: `(seen,)` int64 each."""
    shapes = zip(before.bits, after.bits, strict=True)
    if before.seen > after.seen or any(len(then) != len(now) for then, now in shapes):
        raise ValueError("the two looks are not at one cache, one after the other")
    for then, now in zip(before.bits, after.bits, strict=True):
        back = np.zeros(after.seen, np.int64)
        back[: before.seen] = _per_position(now[:, : then.shape[1]] & ~then, before.seen)
        yield _per_position(now, after.seen), back


def _per_position(bits: Bits, seen: int) -> Counts:
    held = np.unpackbits(bits, axis=1, count=seen)
    return np.asarray(held.sum(0, dtype=np.int64))


def _edges(seen: int, bins: int) -> list[int]:
    return [each * seen // bins for each in range(bins + 1)] if bins else [0]


def _binned(counts: Counts, edges: list[int]) -> Counts:
    return np.add.reduceat(counts, edges[:-1]) if counts.size else counts


def _per_cent(counts: Counts, pairs: Counts) -> tuple[int, ...]:
    """Rounded, but 0 and 100 are only what is exactly that."""
    rounded = np.clip(np.rint(100 * counts / np.maximum(1, pairs)).astype(np.int64), 1, 99)
    exact = np.where(counts == 0, 0, np.where(counts == pairs, 100, rounded))
    return tuple(exact.tolist())


def _short(cells: tuple[int, ...]) -> int | list[int]:
    return cells[0] if len(set(cells)) == 1 else [*cells]


def _long(cells: int | list[int], bins: int) -> tuple[int, ...]:
    return (cells,) * bins if isinstance(cells, int) else tuple(cells)
