"""Experts in MXFP4, as gpt-oss is published: kept as the files have them.

Source: "OCP Microscaling Formats (MX) Specification", version 1.0, sections 5.3.3 (FP4 E2M1) and
5.4.1 (E8M0): 32 numbers of 4 bits share a power of 2.
"""

from functools import partial

import torch
from torch import Tensor, nn

from kvlite.model.experts import PackedExperts
from kvlite.ops.blocks import E2M1

SHARED = 32  # numbers with one scale
# Bytes that are unpacked at once: what stays in a CPU's caches; more is worth a GPU's launches.
AT_ONCE_CPU, AT_ONCE = 1 << 18, 1 << 23


class MXFP4Experts(PackedExperts):
    """One projection of all experts of a layer.

    Attributes:
        blocks: `(experts, outputs, inputs / 32, 16)` uint8, two numbers a byte, the first in the
            lower half.
        scales: `(experts, outputs, inputs / 32)` uint8, exponents of 2 that are 127 too high.
    """

    stacks = ("blocks", "scales")

    def __init__(self, whole: Tensor, dtype: torch.dtype) -> None:
        """Empty, for transformers' `(experts, inputs, outputs)`; `dtype` is what a matrix is
        unpacked to."""
        super().__init__()
        experts, inputs, outputs = whole.shape
        sizes = experts, outputs, inputs // SHARED
        new = partial(torch.empty, dtype=torch.uint8, device=whole.device)
        self.blocks = nn.Parameter(new(*sizes, SHARED // 2), requires_grad=False)
        self.scales = nn.Parameter(new(sizes), requires_grad=False)
        self.dtype = dtype

    def __getitem__(self, expert: int) -> Tensor:
        """One expert's matrix `(inputs, outputs)`."""
        blocks, scales = self.blocks[expert], self.scales[expert]
        matrix = torch.empty(*scales.shape, SHARED, dtype=self.dtype, device=blocks.device)
        # A byte's two numbers are copied as one.
        wide = torch.int64 if self.dtype == torch.float32 else torch.int32
        pairs, into = _pairs(blocks.device).to(self.dtype).view(wide)[:, 0], matrix.view(wide)
        # As elsewhere, float32 is planned as on a CPU.
        on_cpu = blocks.is_cpu or (blocks.is_meta and self.dtype == torch.float32)
        step = max(1, (AT_ONCE_CPU if on_cpu else AT_ONCE) // blocks[0].numel())
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            chosen = blocks[part].flatten().int()
            torch.index_select(pairs, 0, chosen, out=into[part].flatten())
            exponents = scales[part].int() - 127
            powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
            matrix[part].mul_(powers[..., None])
        return matrix.flatten(1).t()

    def in_place(self, transposed: bool) -> bool:
        return transposed

    def products(self, rows: Tensor, chosen: Tensor, bias: Tensor | None) -> Tensor:
        from kvlite.ops.triton_experts import multiply_mxfp4

        return multiply_mxfp4(rows, chosen, self.blocks, self.scales, bias)


def _pairs(device: torch.device) -> Tensor:
    """What each byte stands for, `(256, 2)` float32."""
    codes = torch.arange(256, device=device)
    levels = torch.tensor(E2M1, dtype=torch.float32, device=device) / 2
    return levels[torch.stack([codes & 15, codes >> 4], 1)]
