"""Layers with 4- and 8-bit weights for a CPU, in groups of 32 along the inputs.

A few tokens multiply the packed weights; many tokens multiply weights that are unpacked for them,
which costs little beside the product.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

GROUP = 32
# Up to this many rows, the packed product is faster than unpacking.
FEW_ROWS = 8
# Weights that are unpacked at once, for products that are large enough to be fast.
UNPACKED = 1 << 20


class PackedWeights(nn.Module):
    """A matrix of packed weights; a weight is `code * scale + offset`.

    Attributes:
        bits: 4 or 8.
        codes: `(inputs * bits / 8, outputs)` uint8, as `ops.numba_linear` lays them out.
        scales, offsets: `(inputs / 32, outputs)` float32.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, offsets: Tensor, bits: int) -> None:
        """Take what `quantize` gives."""
        super().__init__()
        self.bits = bits
        self.out_features, self.in_features = codes.shape
        codes = codes.t().contiguous()
        if bits == 4:
            first, second = codes.view(-1, 2, GROUP // 2, self.out_features).unbind(1)
            codes = (first | second << 4).flatten(0, 1)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales.t().contiguous())
        self.register_buffer("offsets", offsets.t().contiguous())

    def product(self, rows: Tensor) -> Tensor:
        """`rows @ weight.T`, `(n, outputs)` float32, of `(n, inputs)` float32."""
        if len(rows) <= FEW_ROWS and not rows.is_meta:
            return torch.from_numpy(self.multiply(rows.contiguous().numpy()))
        out = rows.new_empty(len(rows), self.out_features)
        if len(rows) > FEW_ROWS:
            step = max(64, UNPACKED // self.in_features)
            for first in range(0, self.out_features, step):
                last = min(first + step, self.out_features)
                torch.mm(rows, self.unpacked(first, last), out=out[:, first:last])
        return out

    def unpacked(self, first: int, last: int) -> Tensor:
        """The weights of outputs from `first` to before `last`, transposed: `(inputs, last -
        first)` float32."""
        if self.codes.is_meta:
            return self.scales.new_empty(self.in_features, last - first)
        from kvlite.ops.numba_linear import unpack

        return unpack(self.codes, self.scales, self.offsets, self.bits, first, last)

    @cached_property
    def multiply(self) -> Callable[[np.ndarray], np.ndarray]:
        """As `product`, of arrays of a few contiguous rows."""
        from kvlite.ops.numba_linear import multiplier

        return multiplier(self.codes, self.scales, self.offsets, self.bits)

    def columns(self, ids: Tensor) -> Tensor:
        """The weights of some outputs, `(n, inputs)` float32, of 8 bits."""
        scales, offsets = (each[:, ids].t()[:, :, None] for each in (self.scales, self.offsets))
        codes = self.codes[:, ids].t().float().view(len(ids), -1, GROUP)
        return codes.mul_(scales).add_(offsets).flatten(1)


class PackedLinear(nn.Module):
    """A linear layer of packed weights that takes the place of a plain one."""

    def __init__(self, weight: PackedWeights, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`, float32 like the input."""
        out = self.weight.product(input.reshape(-1, self.weight.in_features))
        out = out.view(*input.shape[:-1], self.weight.out_features)
        return out if self.bias is None else out + self.bias


class PackedEmbedding(nn.Module):
    """An embedding of packed weights that takes the place of a plain one."""

    def __init__(self, weight: PackedWeights) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings `(..., inputs)` of ids `(...)`."""
        return self.weight.columns(ids.flatten()).view(*ids.shape, self.weight.in_features)
