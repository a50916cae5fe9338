"""Vectors in a few bits a channel, each by itself: one can be dropped, replaced or moved.

A vector is rotated by a Hadamard matrix, which spreads outlying channels over all; then each group
of channels is rounded to whole steps between its least and its greatest value. Products are formed
in the rotated space, from whole steps: scales and offsets come in once a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
from torch import Tensor

from kvlite.cache.front import blocks

LARGEST = 65504.0


@dataclass(frozen=True)
class Quantized:
    """Quantized vectors of some KV heads; what they hold may be overwritten.

    Attributes:
        codes: `(batch, heads, n, dim * bits / 8)` uint8; with 8 / bits = p codes a byte, byte j has
            those of channels j, j + dim / p, and so on, the first in the lowest bits.
        scales, zeros: `(batch, heads, groups, n)` float16, of neighbouring channels; a channel is
            code * scale + zero.
        bits: 2, 4 or 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

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
        """Groups of channels."""
        return self.scales.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held."""
        return self.codes, self.scales, self.zeros

    def blocks(self) -> Iterator[slice]:
        """Parts of the vectors whose float32 copies are a few megabytes."""
        batch, heads = self.codes.shape[:2]
        return blocks(self.count, batch * heads * self.dim)

    def write(self, part: slice, vectors: Tensor) -> None:
        """Round vectors `(batch, heads, n, dim)` into n of the places."""
        self.codes[:, :, part], self.scales[..., part], self.zeros[..., part] = self._rounded(
            vectors
        )

    def put(self, places: Tensor, vectors: Tensor, where: Tensor) -> None:
        """Round one vector a head, `(batch, heads, dim)`, into `places` `(batch, heads)`, only
        `where` that is True, `(batch, heads)`."""
        new = self._rounded(vectors[:, :, None])
        wanted = where[:, :, None, None]
        for each, its, along in zip(self.tensors, new, (2, 3, 3), strict=True):
            index = places[:, :, None, None].expand_as(its)
            each.scatter_(along, index, torch.where(wanted, its, each.gather(along, index)))

    def copy(self, others: "Quantized", where: Tensor) -> None:
        """Take over others, as many, as they are, `where` `(batch, heads, n)` is True."""
        masks = where[..., None], where[:, :, None], where[:, :, None]
        for mine, theirs, mask in zip(self.tensors, others.tensors, masks, strict=True):
            mine.copy_(torch.where(mask, theirs, mine))

    def _rounded(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and zeros, as they are held."""
        turned = vectors.float() @ rotation(self.dim, vectors.device)
        channels = turned.unflatten(-1, (self.groups, -1))
        codes, scales, zeros = rounded(channels, -1, self.bits)
        return packed_codes(codes.flatten(-2), self.bits), scales.mT, zeros.mT

    def _planes(self, part: slice) -> Tensor:
        """Codes of some vectors, plane by plane, `(batch * heads, planes, n, dim / planes)`
        float32. Products over planes apart keep all cores busy where heads are few."""
        packed, planes = self.codes[:, :, part].flatten(0, 1), 8 // self.bits
        if planes == 1:
            return packed.float()[:, None]
        codes = packed.new_empty(len(packed), planes, *packed.shape[1:], dtype=torch.float32)
        for plane in range(planes):
            codes[:, plane] = _unpacked(packed, plane, self.bits)
        return codes

    def dot(self, queries: Tensor) -> Tensor:
        """Products of queries `(batch, heads, rows, dim)` float32 with every vector, `(batch,
        heads, rows, n)` float32."""
        (batch, heads, rows, dim), groups = queries.shape, self.groups
        turned = queries @ rotation(dim, queries.device)
        apart = turned[:, :, None] * members(groups, dim, queries.device)
        offsets = apart.sum(-1).mT
        asked = apart.view(batch * heads, groups * rows, 8 // self.bits, -1).transpose(1, 2)
        parts = []
        for part in self.blocks():
            steps = torch.matmul(asked, self._planes(part).mT).sum(1)
            steps = steps.view(batch, heads, groups, rows, -1)
            steps *= self.scales[..., None, part].float()
            total = steps.sum(2) if groups > 1 else steps[:, :, 0]
            parts.append(total.add_(offsets @ self.zeros[..., part].float()))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def weigh(self, weights: Tensor) -> Tensor:
        """Sums of all vectors by weights `(batch, heads, rows, n)` float32, `(batch, heads, rows,
        dim)` float32."""
        (batch, heads, rows, _), groups, dim = weights.shape, self.groups, self.dim
        planes = 8 // self.bits
        steps = weights.new_zeros(batch * heads, planes, groups * rows, dim // planes)
        offset = weights.new_zeros(batch, heads, rows, groups)
        for part in self.blocks():
            own = weights[..., part]
            scaled = own[:, :, None] * self.scales[..., None, part].float()
            steps += scaled.view(batch * heads, 1, groups * rows, -1) @ self._planes(part)
            offset += own @ self.zeros[..., part].float().mT
        turned = steps.transpose(1, 2).reshape(batch, heads, groups, rows, dim)
        turned = (turned * members(groups, dim, weights.device)).sum(2)
        turned += offset.repeat_interleave(dim // groups, -1)
        out: Tensor = turned @ rotation(dim, weights.device)
        return out

    def read(self, part: slice) -> Tensor:
        """Some vectors restored, `(batch, heads, n, dim)` float32."""
        codes = unpacked_codes(self.codes[:, :, part], self.bits)
        channels = codes.unflatten(-1, (self.groups, -1))
        channels *= self.scales[..., part].mT.float()[..., None]
        channels += self.zeros[..., part].mT.float()[..., None]
        out: Tensor = channels.flatten(-2) @ rotation(self.dim, channels.device)
        return out

    def take(self, places: Tensor, heads: list[int]) -> "Quantized":
        """A copy of some vectors, as they are: `places` `(batch, heads, n)` of some heads."""
        along = places[:, :, None]
        return Quantized(
            self.codes[:, heads].gather(
                2, places[..., None].expand(-1, -1, -1, self.codes.shape[3])
            ),
            self.scales[:, heads].gather(3, along.expand(-1, -1, self.groups, -1)),
            self.zeros[:, heads].gather(3, along.expand(-1, -1, self.groups, -1)),
            self.bits,
        )

    def joined(self, later: "Quantized") -> "Quantized":
        """These and others behind them, copied."""
        return Quantized(
            torch.cat([self.codes, later.codes], 2),
            torch.cat([self.scales, later.scales], 3),
            torch.cat([self.zeros, later.zeros], 3),
            self.bits,
        )


def rounded(numbers: Tensor, along: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
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
        planes[..., plane, :] = _unpacked(packed, plane, bits)
    return codes


def _unpacked(packed: Tensor, plane: int, bits: int) -> Tensor:
    """One plane's codes, uint8."""
    shifted = packed >> (plane * bits) if plane else packed
    return shifted if plane == 8 // bits - 1 else shifted & (2**bits - 1)


@cache
def members(groups: int, dim: int, device: torch.device) -> Tensor:
    """Which channels each group has: `(groups, 1, dim)` float32, 1 or 0."""
    own = torch.eye(groups, device=device)
    return own.repeat_interleave(dim // groups, 1)[:, None]


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
