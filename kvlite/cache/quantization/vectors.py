"""Vectors in a few bits a channel: what a form of quantization is."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvlite.cache.segment import Places, Write, blocks, dotted, weighed
from kvlite.ops.heads import of_heads


class QuantizedVectors(ABC):
    """Vectors of some KV heads, `(batch, heads, n, dim)`, in a few bits.

    A form of quantization is a subclass in a file of its own, and one line in `FORMS`: a frozen
    dataclass of tensors of four dimensions, one of which grows with the vectors, and then of
    `bits`. Files know it by the name of its class. `docs/adding-a-quantization.md` has an example.
    Where a form quantizes neighboring vectors together, "whole groups" is meant wherever there is
    a part.

    Attributes:
        bits: a channel.
        AXES: of each of `tensors`, the dimension that grows with the vectors, 2 or 3.
    """

    bits: int
    AXES: ClassVar[tuple[int, ...]]

    @classmethod
    @abstractmethod
    def empty(
        cls, shape: tuple[int, int, int, int], bits: int, group: int, device: torch.device
    ) -> Self:
        """Room for vectors of a shape `(batch, heads, n, dim)`."""

    @staticmethod
    @abstractmethod
    def vector_bytes(dim: int, bits: int, group: int) -> int:
        """Bytes of a vector of `dim` channels, with its part of scales and the like."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held, in the order of the fields; each may be written in place."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Channels."""

    @property
    @abstractmethod
    def group(self) -> int:
        """Numbers that share a scale."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Vectors `(batch, heads, n, dim)` as `tensors` hold them."""

    @abstractmethod
    def read(self, part: slice) -> Tensor:
        """Some vectors restored, `(batch, heads, n, dim)` float32."""

    @classmethod
    def of(cls, vectors: Tensor, bits: int, group: int) -> Self:
        """Vectors `(batch, heads, n, dim)`, rounded."""
        batch, heads, count, dim = vectors.shape
        made = cls.empty((batch, heads, count, dim), bits, group, vectors.device)
        for part in made.blocks():
            made.write(part, vectors[:, :, part])
        return made

    @property
    def count(self) -> int:
        """Vectors a head."""
        return self.tensors[0].shape[self.AXES[0]]

    def blocks(self) -> Iterator[slice]:
        """Parts of the vectors whose float32 copies are a few megabytes."""
        batch, heads = self.tensors[0].shape[:2]
        return blocks(self.count, batch * heads * self.dim)

    def first(self, count: int) -> Self:
        """The first vectors, where they are."""
        return self._with(self._part(slice(0, count)))

    def clear(self, part: slice) -> None:
        """Let a part hold finite numbers."""
        for tensor in self._part(part):
            tensor.zero_()

    def joined(self, later: Self) -> Self:
        """These followed by others, copied."""
        each = zip(self.tensors, later.tensors, self.AXES, strict=True)
        return self._with(torch.cat([mine, theirs], along) for mine, theirs, along in each)

    def write(self, part: slice, vectors: Tensor) -> None:
        """Round vectors `(batch, heads, n, dim)` into n of the places."""
        for tensor, new in zip(self._part(part), self.encode(vectors), strict=True):
            tensor.copy_(new)

    def putting(self, places: Tensor, vectors: Tensor, where: Tensor) -> Write:
        """Round one vector a head, `(batch, heads, dim)`, to go into `places` `(batch, heads)`,
        only `where` that is True, `(batch, heads)`."""
        wanted, writes = where[:, :, None, None], []
        new = self.encode(vectors[:, :, None])
        for each, its, along in zip(self.tensors, new, self.AXES, strict=True):
            index = places[:, :, None, None].expand_as(its)
            its = torch.where(wanted, its, each.gather(along, index))
            writes.append((each, along, index, its))

        def write() -> None:
            for each, along, index, its in writes:
                each.scatter_(along, index, its)

        return write

    def replacing(self, at: Places, vectors: Tensor) -> Write:
        """Round vectors `(n, dim)` to go into n places."""
        new = self.encode(vectors[None, None])

        def write() -> None:
            for each, its, along in zip(self.tensors, new, self.AXES, strict=True):
                each.movedim(along, 2)[at] = its.movedim(along, 2)[0, 0]

        return write

    def copy(self, part: slice, others: "QuantizedVectors", where: Tensor) -> None:
        """Copy others of this form unchanged into a part, `where` `(batch, heads, n)` is True."""
        masks = {2: where[..., None], 3: where[:, :, None]}
        own = zip(self._part(part), others.tensors, self.AXES, strict=True)
        for mine, theirs, along in own:
            mine.copy_(torch.where(masks[along], theirs, mine))

    def take(self, places: Tensor, heads: list[int]) -> Self:
        """An unchanged copy of some vectors: `places` `(batch, heads, n)` of some heads."""

        def taken(tensor: Tensor, along: int) -> Tensor:
            index = places[..., None] if along == 2 else places[:, :, None]
            shape = [-1, -1, tensor.shape[2], tensor.shape[3]]
            shape[along] = -1
            return of_heads(tensor, heads).gather(along, index.expand(shape))

        return self._with(map(taken, self.tensors, self.AXES))

    def dot(self, queries: Tensor) -> Tensor:
        """Products of queries `(batch, heads, rows, dim)` float32 with every vector, `(batch,
        heads, rows, n)` float32."""
        return dotted(queries, map(self.read, self.blocks()))

    def weigh(self, weights: Tensor) -> Tensor:
        """Sums of all vectors by weights `(batch, heads, rows, n)` float32, `(batch, heads, rows,
        dim)` float32."""
        return weighed(weights, self.dim, map(self.read, self.blocks()))

    def _part(self, part: slice) -> Iterator[Tensor]:
        """Of each tensor, what a part of the vectors has."""
        start, stop, _ = part.indices(self.count)
        for tensor, along in zip(self.tensors, self.AXES, strict=True):
            size, count = tensor.shape[along], max(1, self.count)
            first, last = start * size // count, stop * size // count
            yield tensor.narrow(along, first, last - first)

    def _with(self, tensors: Iterable[Tensor]) -> Self:
        form: Any = type(self)
        made: Self = form(*tensors, self.bits)
        return made
