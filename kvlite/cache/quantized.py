"""Vectors in a few bits a channel, each by itself: one can be dropped, replaced or moved.

A vector is rotated by a Hadamard matrix, which spreads outlying channels over all; then each group
of channels is rounded to whole steps between its least and its greatest value. Products are formed
in the rotated space.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import gcd
from typing import Self

import torch
from torch import Tensor

from kvlite.cache.segment import Places, Write, blocks, dotted, weighed
from kvlite.ops.device import has_compiled
from kvlite.ops.heads import of_heads

LARGEST = 65504.0


@dataclass(frozen=True)
class Codes:
    """Vectors of some KV heads, their numbers rounded in groups.

    Attributes:
        codes: `(batch, heads, n, dim * bits / 8)` uint8; with 8 / bits = p codes a byte, byte j has
            those of channels j, j + dim / p, and so on, the first in the lowest bits.
        scales, zeros: `(batch, heads, groups, ...)` float16; a number is code * scale + zero.
        bits: 2, 4 or 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    # The dimension of scales and zeros that grows with the vectors.
    VECTORS_OF_SCALES = 3

    def first(self, count: int) -> Self:
        """The first vectors, whole groups, where they are."""
        along = self.VECTORS_OF_SCALES
        scales = count * self.scales.shape[along] // max(1, self.count)
        steps, zeros = (each.narrow(along, 0, scales) for each in (self.scales, self.zeros))
        return type(self)(self.codes[:, :, :count], steps, zeros, self.bits)

    @property
    def count(self) -> int:
        """Vectors a head."""
        return self.codes.shape[2]

    @property
    def dim(self) -> int:
        """Channels."""
        return self.codes.shape[3] * 8 // self.bits

    @property
    def groups(self) -> int:
        """Groups of channels, or of vectors."""
        return self.scales.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held."""
        return self.codes, self.scales, self.zeros

    def clear(self, part: slice) -> None:
        """Let the numbers of a part, whole groups, be 0."""
        start, stop, _ = part.indices(self.count)
        along, each = self.VECTORS_OF_SCALES, max(1, self.count)
        first, last = (at * self.scales.shape[along] // each for at in (start, stop))
        for numbers in (self.scales, self.zeros):
            numbers.narrow(along, first, last - first).zero_()

    def joined(self, later: Self) -> Self:
        """These followed by others, copied."""
        return type(self)(
            torch.cat([self.codes, later.codes], 2),
            torch.cat([self.scales, later.scales], self.VECTORS_OF_SCALES),
            torch.cat([self.zeros, later.zeros], self.VECTORS_OF_SCALES),
            self.bits,
        )


class Quantized(Codes):
    """Vectors rounded each by itself, in groups of neighboring channels: scales and zeros are
    `(batch, heads, groups, n)`. What they hold may be overwritten."""

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], bits: int, group: int, device: torch.device
    ) -> "Quantized":
        """Room for vectors `(batch, heads, n, dim)`, dim a multiple of 8 / bits."""
        batch, heads, count, dim = shape
        groups = dim // gcd(group, dim)
        codes = torch.empty(batch, heads, count, dim * bits // 8, dtype=torch.uint8, device=device)
        scales = torch.empty(batch, heads, groups, count, dtype=torch.float16, device=device)
        return cls(codes, scales, torch.empty_like(scales), bits)

    @classmethod
    def of(cls, vectors: Tensor, bits: int, group: int) -> "Quantized":
        """Vectors `(batch, heads, n, dim)`, rounded."""
        batch, heads, count, dim = vectors.shape
        made = cls.empty((batch, heads, count, dim), bits, group, vectors.device)
        for part in made.blocks():
            made.write(part, vectors[:, :, part])
        return made

    def blocks(self) -> Iterator[slice]:
        """Parts of the vectors whose float32 copies are a few megabytes; on meta tensors, two stand
        for all."""
        batch, heads = self.codes.shape[:2]
        parts = blocks(self.count, batch * heads * self.dim)
        return islice(parts, 2) if self.codes.is_meta else parts

    def write(self, part: slice, vectors: Tensor) -> None:
        """Round vectors `(batch, heads, n, dim)` into n of the places."""
        self.codes[:, :, part], self.scales[..., part], self.zeros[..., part] = self._quantized(
            vectors
        )

    def putting(self, places: Tensor, vectors: Tensor, where: Tensor) -> Write:
        """Round one vector a head, `(batch, heads, dim)`, to go into `places` `(batch, heads)`,
        only `where` that is True, `(batch, heads)`."""
        new = self._quantized(vectors[:, :, None])
        wanted, writes = where[:, :, None, None], []
        for each, its, along in zip(self.tensors, new, (2, 3, 3), strict=True):
            index = places[:, :, None, None].expand_as(its)
            its = torch.where(wanted, its, each.gather(along, index))
            writes.append((each, along, index, its))

        def write() -> None:
            for each, along, index, its in writes:
                each.scatter_(along, index, its)

        return write

    def replacing(self, at: Places, vectors: Tensor) -> Write:
        """Round vectors `(n, dim)` to go into n places."""
        codes, scales, zeros = self._quantized(vectors[None, None])
        batch, heads, places = at

        def write() -> None:
            self.codes[at] = codes[0, 0]
            self.scales[batch, heads, :, places] = scales[0, 0].mT
            self.zeros[batch, heads, :, places] = zeros[0, 0].mT

        return write

    def copy(self, part: slice, others: "Quantized", where: Tensor) -> None:
        """Copy others unchanged into a part, `where` `(batch, heads, n)` is True."""
        masks = where[..., None], where[:, :, None], where[:, :, None]
        own = self.codes[:, :, part], self.scales[..., part], self.zeros[..., part]
        for mine, theirs, mask in zip(own, others.tensors, masks, strict=True):
            mine.copy_(torch.where(mask, theirs, mine))

    def _quantized(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned = vectors.float() @ rotation(self.dim, vectors.device)
        channels = turned.unflatten(-1, (self.groups, -1))
        codes, scales, zeros = quantized(channels, -1, self.bits)
        return packed_codes(codes.flatten(-2), self.bits), scales.mT, zeros.mT

    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes.flatten(0, 1), self.scales.flatten(0, 1), self.zeros.flatten(0, 1)

    def dot(self, queries: Tensor) -> Tensor:
        """Products of queries `(batch, heads, rows, dim)` float32 with every vector, `(batch,
        heads, rows, n)` float32."""
        turned = queries @ rotation(self.dim, queries.device)
        if queries.is_meta:  # as compiled products and kernels take it
            return turned.new_empty(*queries.shape[:3], self.count)
        if has_compiled(queries.device):
            from kvlite.ops import numba_quant as compiled

            out = compiled.dot(turned.flatten(0, 1), *self._flat(), self.bits)
            return out.reshape(*queries.shape[:3], self.count)
        return dotted(turned, map(self._turned, self.blocks()))

    def weigh(self, weights: Tensor) -> Tensor:
        """Sums of all vectors by weights `(batch, heads, rows, n)` float32, `(batch, heads, rows,
        dim)` float32."""
        if weights.is_meta:
            return weights.new_empty(*weights.shape[:3], self.dim)
        if has_compiled(weights.device):
            from kvlite.ops import numba_quant as compiled

            turned = compiled.weigh(weights.flatten(0, 1), *self._flat(), self.bits)
            turned = turned.reshape(*weights.shape[:3], self.dim)
        else:
            turned = weighed(weights, self.dim, map(self._turned, self.blocks()))
        out: Tensor = turned @ rotation(self.dim, weights.device)
        return out

    def read(self, part: slice) -> Tensor:
        """Some vectors restored, `(batch, heads, n, dim)` float32."""
        out: Tensor = self._turned(part) @ rotation(self.dim, self.codes.device)
        return out

    def _turned(self, part: slice) -> Tensor:
        codes = unpacked_codes(self.codes[:, :, part], self.bits)
        channels = codes.unflatten(-1, (self.groups, -1))
        channels *= self.scales[..., part].mT.float()[..., None]
        channels += self.zeros[..., part].mT.float()[..., None]
        return codes

    def take(self, places: Tensor, heads: list[int]) -> "Quantized":
        """An unchanged copy of some vectors: `places` `(batch, heads, n)` of some heads."""
        along = places[:, :, None]
        return Quantized(
            of_heads(self.codes, heads).gather(
                2, places[..., None].expand(-1, -1, -1, self.codes.shape[3])
            ),
            of_heads(self.scales, heads).gather(3, along.expand(-1, -1, self.groups, -1)),
            of_heads(self.zeros, heads).gather(3, along.expand(-1, -1, self.groups, -1)),
            self.bits,
        )


def quantized(numbers: Tensor, along: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole steps of float32 numbers, put in their place, between the least and the greatest along
    a dimension; and, without that dimension, the size of a step and the least, float16."""
    low, high = numbers.clamp_(-LARGEST, LARGEST).aminmax(dim=along, keepdim=True)
    levels = 2**bits - 1
    zeros, scales = low.half(), ((high - low) / levels).half()
    steps = torch.where(scales == 0, 1.0, scales.float())
    codes = numbers.sub_(zeros.float()).div_(steps).round_().clamp_(0, levels)
    return codes, scales.squeeze(along), zeros.squeeze(along)


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers `(..., dim)` of so many bits, as bytes `(..., dim * bits / 8)` uint8."""
    planes = codes.to(torch.uint8).unflatten(-1, (8 // bits, -1))
    packed: Tensor = planes[..., 0, :].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[..., plane, :] << (plane * bits)
    return packed


def unpacked_codes(packed: Tensor, bits: int) -> Tensor:
    """The numbers of `packed_codes`, `(..., dim)` float32."""
    count = 8 // bits
    codes = torch.empty(*packed.shape[:-1], packed.shape[-1] * count, device=packed.device)
    planes = codes.unflatten(-1, (count, -1))
    for plane in range(count):
        shifted = packed >> (plane * bits) if plane else packed
        planes[..., plane, :] = shifted if plane == count - 1 else shifted & (2**bits - 1)
    return codes


@cache
def rotation(dim: int, device: torch.device) -> Tensor:
    """Hadamard's matrix, orthonormal and its own inverse, `(dim, dim)` float32; where dim is no
    power of two, as large blocks of it as divide dim, along the diagonal."""
    size = dim & -dim
    block = torch.ones(1, 1)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    block = block / size**0.5
    matrix: Tensor = torch.block_diag(*[block] * (dim // size))
    return matrix.to(device)
