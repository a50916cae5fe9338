"""Vectors in a few bits a channel, each by itself: one can be dropped, replaced or moved.

A vector is rotated by a Hadamard matrix, which spreads outlying channels over all; then each group
of channels is rounded to whole steps between its least and its greatest value. Products are formed
in the rotated space.
"""

from collections.abc import Iterator
from functools import cache
from itertools import islice
from math import gcd

import torch
from torch import Tensor

from kvlite.cache.quantization.affine import AffineVectors, packed_codes, quantized, unpacked_codes
from kvlite.cache.segment import dotted, weighed
from kvlite.ops.device import has_compiled


class Hadamard(AffineVectors):
    """Vectors rotated, then rounded in groups of neighboring channels: scales and zeros are
    `(batch, heads, groups, n)`. What they hold may be overwritten."""

    AXES = (2, 3, 3)

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], bits: int, group: int, device: torch.device
    ) -> "Hadamard":
        batch, heads, count, dim = shape
        groups = dim // gcd(group, dim)
        codes = torch.empty(batch, heads, count, dim * bits // 8, dtype=torch.uint8, device=device)
        scales = torch.empty(batch, heads, groups, count, dtype=torch.float16, device=device)
        return cls(codes, scales, torch.empty_like(scales), bits)

    @staticmethod
    def vector_bytes(dim: int, bits: int, group: int) -> int:
        return dim * bits // 8 + 4 * dim // gcd(group, dim)

    @property
    def group(self) -> int:
        return self.dim // max(1, self.groups)

    def blocks(self) -> Iterator[slice]:
        """On meta tensors, two parts stand for all."""
        parts = super().blocks()
        return islice(parts, 2) if self.codes.is_meta else parts

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        turned = vectors.float() @ rotation(self.dim, vectors.device)
        channels = turned.unflatten(-1, (self.groups, -1))
        codes, scales, zeros = quantized(channels, -1, self.bits)
        return packed_codes(codes.flatten(-2), self.bits), scales.mT, zeros.mT

    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes.flatten(0, 1), self.scales.flatten(0, 1), self.zeros.flatten(0, 1)

    def dot(self, queries: Tensor) -> Tensor:
        turned = queries @ rotation(self.dim, queries.device)
        if queries.is_meta:  # as compiled products and kernels take it
            return turned.new_empty(*queries.shape[:3], self.count)
        if has_compiled(queries.device):
            from kvlite.ops import numba_quant as compiled

            out = compiled.dot(turned.flatten(0, 1), *self._flat(), self.bits)
            return out.reshape(*queries.shape[:3], self.count)
        return dotted(turned, map(self._turned, self.blocks()))

    def weigh(self, weights: Tensor) -> Tensor:
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
        out: Tensor = self._turned(part) @ rotation(self.dim, self.codes.device)
        return out

    def _turned(self, part: slice) -> Tensor:
        codes = unpacked_codes(self.codes[:, :, part], self.bits)
        channels = codes.unflatten(-1, (self.groups, -1))
        channels *= self.scales[..., part].mT.float()[..., None]
        channels += self.zeros[..., part].mT.float()[..., None]
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
