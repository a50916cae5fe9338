"""Entries in a form smaller than keys and values, in the middle of a head group's own slots."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvlite.cache.packed import Packed

ELEMENTS_AT_ONCE = 1 << 19

Places = tuple[Tensor, Tensor, Tensor]
"""Entries here and there: which sequence, head and place each has, `(n,)` int64."""

Write = Callable[[], object]
"""Something that is ready to be written, and allocates nothing when it is: where memory runs out
before, nothing has changed."""


class CompressedSegment(Protocol):
    """Older entries of a head group, of which keys and values are computed whenever they are
    needed.
    What is new goes into the head group's own slots, exactly."""

    @property
    def start(self) -> int:
        """How many of the head group's own slots come before the segment."""

    @property
    def packed(self) -> "Packed | None":
        """Itself, if its entries are quantized; else they never change, and two layers may hold the
        same ones."""

    @property
    def positions(self) -> Tensor:
        """`(batch, heads, entries)` int32, ascending unless `packed`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds, each with a storage of its own; two layers may hold the same ones."""

    def write_keys(self, out: Tensor) -> None:
        """Compute the keys into `out`, `(batch, heads, entries, dim)`."""

    def write_values(self, out: Tensor) -> None:
        """Compute the values into `out`, `(batch, heads, entries, dim)`."""

    def dot(self, queries: Tensor) -> Tensor:
        """Products of queries `(batch, heads, rows, dim)` float32 with all keys, `(batch, heads,
        rows, entries)` float32, a part at a time."""

    def weigh(self, weights: Tensor) -> Tensor:
        """Sums of all values by weights `(batch, heads, rows, entries)` float32, `(batch, heads,
        rows, dim)` float32, a part at a time."""


@dataclass(frozen=True)
class Exact:
    """Vectors as they are.

    Attributes:
        vectors: `(batch, heads, n, dim)`.
    """

    vectors: Tensor

    @property
    def count(self) -> int:
        """Vectors a head."""
        return self.vectors.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The one."""
        return (self.vectors,)

    def blocks(self) -> Iterator[slice]:
        """Parts of them whose float32 copies are a few megabytes."""
        batch, heads, count, dim = self.vectors.shape
        return blocks(count, batch * heads * dim)

    def read(self, part: slice) -> Tensor:
        """Some of them, `(batch, heads, n, dim)`."""
        return self.vectors[:, :, part]

    def dot(self, queries: Tensor) -> Tensor:
        """See `CompressedSegment`."""
        return dotted(queries, map(self.read, self.blocks()))

    def weigh(self, weights: Tensor) -> Tensor:
        """See `CompressedSegment`."""
        return weighed(weights, self.vectors.shape[3], map(self.read, self.blocks()))


def dotted(queries: Tensor, vectors: Iterable[Tensor]) -> Tensor:
    """Products of queries `(batch, heads, rows, dim)` float32 with vectors, of which a part exists
    at a time, `(batch, heads, n, dim)`."""
    return torch.cat([queries @ part.float().mT for part in vectors], -1)


def weighed(weights: Tensor, dim: int, vectors: Iterable[Tensor]) -> Tensor:
    """Sums of vectors by weights `(batch, heads, rows, n)` float32, a part at a time."""
    out, start = weights.new_zeros(*weights.shape[:3], dim), 0
    for part in vectors:
        end = start + part.shape[2]
        out += weights[..., start:end] @ part.float()
        start = end
    return out


def blocks(count: int, elements: int) -> Iterator[slice]:
    """Parts of `count` vectors, `elements` numbers each, that are a few megabytes in float32."""
    size = max(1, ELEMENTS_AT_ONCE // elements)
    return (slice(at, min(at + size, count)) for at in range(0, count, size))


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storage behind tensors, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    # Held, so that no address comes twice.
    unique = {storage._cdata: storage for storage in storages}
    return sum(storage.nbytes() for storage in unique.values())
