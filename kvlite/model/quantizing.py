"""Weights of a decoder layer in 4 or 8 bits, also those of experts, which are no linear layers to
transformers.

Sources: as in `model.weights`. bitsandbytes rounds; numbers are those it gives each matrix alone.
"""

from collections.abc import Callable
from functools import cache, partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from kvlite.model.architectures import EXPANDS
from kvlite.model.experts import PackedExperts, pack_experts
from kvlite.model.mxfp4 import MXFP4Experts
from kvlite.model.weights import BLOCK, MXFP4, Weights

NESTED = 256  # scales of blocks that share a scale of their own


def quantize_layer(layer: nn.Module, weights: Weights) -> None:
    """Replace, in place, all matrices of a decoder layer on its device by quantized ones."""
    for name, child in [*layer.named_modules()]:
        if type(child) is nn.Linear and not name.endswith(EXPANDS):
            owner, _, own = name.rpartition(".")
            setattr(layer.get_submodule(owner), own, _quantized(child, weights))
    quantize_experts(layer, weights)


def quantize_experts(module: nn.Module, weights: Weights) -> None:
    """Replace the tensors of all experts within a module, expert by expert; by empty ones, where
    files have them packed."""
    kinds: dict[str, Callable[..., PackedExperts]] = {
        "nf4": NF4Experts,
        "int8": Int8Experts,
        MXFP4: MXFP4Experts,
    }
    pack_experts(module, partial(kinds[weights.name], dtype=weights.dtype))


def _quantized(linear: nn.Linear, weights: Weights) -> nn.Module:
    """As transformers does it with `Weights.config`."""
    import bitsandbytes

    kinds: Any = bitsandbytes.nn
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    data = linear.weight.data
    with torch.device("meta"):
        if weights.name == "int8":
            made = kinds.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        else:
            made = kinds.Linear4bit(*sizes, compute_dtype=weights.dtype, quant_type="nf4")
    given = {**vars(made.weight), "requires_grad": False}
    if weights.name == "int8":
        given.pop("SCB", None)
        made.weight = kinds.Int8Params(data.cpu(), **given).to(data.device)
    else:
        made.weight = kinds.Params4bit(data, **given).to(data.device)
    if linear.bias is not None:
        made.bias = linear.bias
    quantized: nn.Module = made.requires_grad_(False)
    return quantized


@cache
def _levels(device: torch.device) -> Tensor:
    """What the 16 codes of nf4 stand for, `(16,)` float32."""
    import bitsandbytes

    functions: Any = bitsandbytes.functional
    levels: Tensor = functions.get_4bit_type("nf4", device)
    return levels


class NF4Experts(PackedExperts):
    """Experts in nf4, with double quantization.

    Attributes:
        codes: `(experts, numbers / 2)` uint8.
        scales: `(experts, blocks)` uint8, of blocks of 64.
        nested: `(experts, blocks / 256)` float32, the scales' scales; `offsets`, `(experts,)`
            float32, their means; `table`, `(256,)` float32, what they stand for.
    """

    stacks = ("codes", "scales", "nested", "offsets")

    def __init__(self, whole: Tensor, dtype: torch.dtype) -> None:
        """Quantize `(experts, rows, columns)`; `dtype` is what a matrix is unpacked to."""
        super().__init__()
        self.size, self.dtype = tuple(whole.shape[1:]), dtype
        experts, numbers = len(whole), prod(self.size)
        blocks = ceil(numbers / BLOCK)
        new = partial(_frozen, whole.device)
        self.codes = new(torch.uint8, experts, ceil(numbers / 2))
        self.scales = new(torch.uint8, experts, blocks)
        self.nested = new(torch.float32, experts, ceil(blocks / NESTED))
        self.offsets, self.table = new(torch.float32, experts), new(torch.float32, 256)
        for expert, matrix in enumerate([] if whole.is_meta else whole):
            self._quantize(expert, matrix)

    def _quantize(self, expert: int, matrix: Tensor) -> None:
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(matrix, None, None, BLOCK, True, "nf4")
        self.codes[expert] = codes[:, 0]
        self.scales[expert], self.nested[expert] = state.absmax, state.state2.absmax
        self.offsets[expert], self.table.data = state.offset, state.state2.code

    def __getitem__(self, expert: int) -> Tensor:
        if self.codes.is_meta:
            sizes = self.nested.new_empty(self.scales.shape[1])
            return sizes.new_empty(self.size, dtype=self.dtype)
        import bitsandbytes  # noqa: F401

        ops: Any = torch.ops.bitsandbytes
        scales, nested = self.scales[expert], self.nested[expert]
        sizes = ops.dequantize_blockwise(scales, nested, self.table, NESTED, torch.float32)
        sizes += self.offsets[expert]
        codes = self.codes[expert][:, None]
        matrix: Tensor = ops.dequantize_4bit(codes, sizes, BLOCK, "nf4", self.size, self.dtype)
        return matrix

    def in_place(self, transposed: bool) -> bool:
        return not transposed and self.size[1] % BLOCK == 0

    def products(self, rows: Tensor, chosen: Tensor, bias: Tensor | None) -> Tensor:
        from kvlite.ops.triton_experts import multiply_nf4

        packed = self.codes, self.scales, self.nested, self.offsets
        return multiply_nf4(rows, chosen, packed, (_levels(rows.device), self.table), bias)


class Int8Experts(PackedExperts):
    """Experts in 8 bits. Activations stay as they are, unlike those of `LLM.int8()`.

    Attributes:
        codes: `(experts, rows, columns)` int8.
        scales: `(experts, rows)` float32, a 127th of each row's largest.
    """

    stacks = ("codes", "scales")

    def __init__(self, whole: Tensor, dtype: torch.dtype) -> None:
        """As `NF4Experts`."""
        super().__init__()
        self.dtype = dtype
        self.codes = _frozen(whole.device, torch.int8, *whole.shape)
        self.scales = _frozen(whole.device, torch.float32, *whole.shape[:2])
        for expert, matrix in enumerate([] if whole.is_meta else whole):
            scales = matrix.abs().amax(1).float() / 127
            self.scales[expert] = scales
            steps = matrix.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
            self.codes[expert] = steps.round_()

    def __getitem__(self, expert: int) -> Tensor:
        codes, scales = self.codes[expert], self.scales[expert][:, None]
        return torch.mul(codes, scales, out=torch.empty_like(codes, dtype=self.dtype))


def _frozen(device: torch.device, dtype: torch.dtype, *sizes: int) -> nn.Parameter:
    """An empty parameter: what moves a layer's weights, moves it too."""
    return nn.Parameter(torch.empty(sizes, dtype=dtype, device=device), requires_grad=False)
