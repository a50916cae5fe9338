"""A few tokens by the experts they chose, on CUDA: weights are read where they lie.

Which experts these are is read on the device, so that a CUDA graph can hold the launch. Each token
reads each of its experts for itself, which is right as long as few tokens share one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Outputs and inputs that a program has in registers at once; and where neighbors are outputs.
TILE, TILE_OF_COLUMNS = (8, 512), (64, 64)


def multiply(rows: Tensor, chosen: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """`weights[e] @ row + bias[e]` for each chosen expert e, `(pairs, outputs)` of the rows' dtype.

    Args:
        rows: `(n, inputs)`, each of which chose `pairs / n` experts.
        chosen: `(pairs,)` int64, those of the first row first.
        weights: `(experts, outputs, inputs)`, of any strides.
        bias: `(experts, outputs)`.
    """
    pairs, (_, outputs, inputs) = len(chosen), weights.shape
    tile = TILE if weights.stride(2) == 1 else TILE_OF_COLUMNS
    out = rows.new_empty(pairs, outputs)
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(rows):
        _multiply[pairs, triton.cdiv(outputs, tile[0])](
            rows.contiguous(),
            chosen,
            weights,
            bias,
            out,
            pairs // len(rows),
            outputs,
            inputs,
            *weights.stride(),
            OUTPUTS=tile[0],
            INPUTS=tile[1],
            num_warps=4,
        )
    return out


@triton.jit
def _multiply(
    rows,
    chosen,
    weights,
    bias,
    out,
    each,
    outputs,
    inputs,
    expert_stride,
    output_stride,
    input_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Some outputs of one pair."""
    pair = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = own < outputs
    expert = tl.load(chosen + pair)
    lines = weights + expert * expert_stride + own[:, None] * output_stride
    row = rows + pair // each * inputs
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        at = first + tl.arange(0, INPUTS)
        there = real[:, None] & (at < inputs)[None, :]
        weight = tl.load(lines + at[None, :] * input_stride, mask=there, other=0.0)
        x = tl.load(row + at, mask=at < inputs, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    made = tl.sum(sums, axis=1)
    if bias is not None:
        made += tl.load(bias + expert * outputs + own, mask=real, other=0.0).to(tl.float32)
    tl.store(out + pair * outputs + own, made.to(out.dtype.element_ty), mask=real)
