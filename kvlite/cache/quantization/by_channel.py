"""Keys in a few bits, channel by channel: for caches that only grow, for comparison."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.cache.quantization.vectors import (
    QuantizedVectors,
    packed_codes,
    quantized,
    unpacked_codes,
)
from kvlite.cache.segment import blocks


@dataclass(frozen=True)
class ByChannel(QuantizedVectors):
    """Each channel rounded over groups of neighboring vectors. Values are rounded each by itself.

    Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3.

    Attributes:
        codes: `(batch, heads, n, dim * bits / 8)` uint8, as `Hadamard` has them.
        scales, zeros: `(batch, heads, groups, dim)` float16.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    AXES = (2, 2, 2)

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], bits: int, group: int, device: torch.device
    ) -> "ByChannel":
        batch, heads, count, dim = shape
        codes = torch.empty(batch, heads, count, dim * bits // 8, dtype=torch.uint8, device=device)
        scales = torch.empty(batch, heads, count // group, dim, dtype=torch.float16, device=device)
        return cls(codes, scales, torch.empty_like(scales), bits)

    @staticmethod
    def vector_bytes(dim: int, bits: int, group: int) -> int:
        return dim * bits // 8 + 4 * dim // group

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.zeros

    @property
    def dim(self) -> int:
        return self.codes.shape[3] * 8 // self.bits

    @property
    def group(self) -> int:
        return self.count // max(1, self.scales.shape[2])

    def blocks(self) -> Iterator[slice]:
        """Whole groups."""
        (batch, heads), each = self.codes.shape[:2], self.group
        for part in blocks(self.scales.shape[2], batch * heads * self.dim * each):
            yield slice(part.start * each, part.stop * each)

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        groups = vectors.to(torch.float32, copy=True).unflatten(2, (-1, self.group))
        codes, scales, zeros = quantized(groups, 3, self.bits)
        return packed_codes(codes.flatten(2, 3), self.bits), scales, zeros

    def read(self, part: slice) -> Tensor:
        codes, scales, zeros = self._part(part)
        groups = unpacked_codes(codes, self.bits).unflatten(2, (-1, self.group))
        groups *= scales[:, :, :, None].float()
        groups += zeros[:, :, :, None].float()
        out: Tensor = groups.flatten(2, 3)
        return out
