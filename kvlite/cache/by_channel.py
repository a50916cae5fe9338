"""Keys in a few bits, channel by channel: for caches that only grow, for comparison."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvlite.cache.quantized import Codes, packed_codes, quantized, unpacked_codes
from kvlite.cache.segment import blocks, dotted, weighed


class ByChannel(Codes):
    """Each channel rounded over groups of neighboring vectors: scales and zeros are `(batch, heads,
    groups, dim)`. Single vectors of a group cannot be dropped or replaced.

    Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3.
    """

    VECTORS_OF_SCALES = 2

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int, int], bits: int, group: int, device: torch.device
    ) -> "ByChannel":
        """Room for vectors `(batch, heads, n, dim)`, n a multiple of `group`."""
        batch, heads, count, dim = shape
        codes = torch.empty(batch, heads, count, dim * bits // 8, dtype=torch.uint8, device=device)
        scales = torch.empty(batch, heads, count // group, dim, dtype=torch.float16, device=device)
        return cls(codes, scales, torch.empty_like(scales), bits)

    @property
    def _group(self) -> int:
        return self.count // max(1, self.groups)

    def blocks(self) -> Iterator[slice]:
        """Whole groups, whose float32 copies are a few megabytes."""
        (batch, heads), size = self.codes.shape[:2], self._group
        for part in blocks(self.groups, batch * heads * self.dim * size):
            yield slice(part.start * size, part.stop * size)

    def write(self, part: slice, vectors: Tensor) -> None:
        """Round vectors `(batch, heads, n, dim)` into n of the places, both whole groups."""
        groups = vectors.to(torch.float32, copy=True).unflatten(2, (-1, self._group))
        codes, scales, zeros = quantized(groups, 3, self.bits)
        own = slice(part.start // self._group, part.stop // self._group)
        self.codes[:, :, part] = packed_codes(codes.flatten(2, 3), self.bits)
        self.scales[:, :, own], self.zeros[:, :, own] = scales, zeros

    def read(self, part: slice) -> Tensor:
        """Some vectors restored, whole groups, `(batch, heads, n, dim)` float32."""
        own = slice(part.start // self._group, part.stop // self._group)
        groups = unpacked_codes(self.codes[:, :, part], self.bits).unflatten(2, (-1, self._group))
        groups *= self.scales[:, :, own, None].float()
        groups += self.zeros[:, :, own, None].float()
        out: Tensor = groups.flatten(2, 3)
        return out

    def dot(self, queries: Tensor) -> Tensor:
        return dotted(queries, map(self.read, self.blocks()))

    def weigh(self, weights: Tensor) -> Tensor:
        return weighed(weights, self.dim, map(self.read, self.blocks()))
