"""Numbers in groups, as whole steps from the least of the group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.cache.quantization.vectors import QuantizedVectors

LARGEST = 65504.0


@dataclass(frozen=True)
class AffineVectors(QuantizedVectors):
    """Vectors whose numbers are code * scale + zero.

    Attributes:
        codes: `(batch, heads, n, dim * bits / 8)` uint8; with 8 / bits = p codes a byte, byte j has
            those of channels j, j + dim / p, and so on, the first in the lowest bits.
        scales, zeros: `(batch, heads, groups, ...)` float16.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.zeros

    @property
    def dim(self) -> int:
        return self.codes.shape[3] * 8 // self.bits

    @property
    def groups(self) -> int:
        """Groups of channels, or of vectors."""
        return self.scales.shape[2]


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
