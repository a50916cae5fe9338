"""Keys in a few bits, channel by channel: for caches that only grow, for comparison."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvlite.cache.quantization.affine import AffineVectors, packed_codes, quantized, unpacked_codes
from kvlite.cache.segment import blocks


class ByChannel(AffineVectors):
    """Each channel rounded over groups of neighboring vectors: scales and zeros are `(batch, heads,
    groups, dim)`. Values are rounded each by itself.

    Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3.
    """

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
    def group(self) -> int:
        return self.count // max(1, self.groups)

    def blocks(self) -> Iterator[slice]:
        """Whole groups."""
        (batch, heads), each = self.codes.shape[:2], self.group
        for part in blocks(self.groups, batch * heads * self.dim * each):
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
