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
# Likewise outputs and groups of inputs with a scale of their own.
MXFP4_TILE, NF4_TILE = (8, 16), (8, 8)


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
            rows.contiguous(), chosen, weights, bias, out, pairs // len(rows), outputs, inputs,
            *weights.stride(),
            OUTPUTS=tile[0], INPUTS=tile[1],
            num_warps=4,
        )  # fmt: skip
    return out


def multiply_mxfp4(
    rows: Tensor, chosen: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As `multiply`, by weights as `model.mxfp4` has them: blocks `(experts, outputs, inputs / 32,
    16)` and scales `(experts, outputs, inputs / 32)` uint8."""
    outputs, groups = scales.shape[1:]
    packed = blocks, scales, None, None, None, None
    return _multiply_codes(rows, chosen, packed, bias, (outputs, groups, 16), MXFP4_TILE)


def multiply_nf4(
    rows: Tensor,
    chosen: Tensor,
    packed: tuple[Tensor, Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    bias: Tensor | None = None,
) -> Tensor:
    """As `multiply`, by weights `(experts, outputs, inputs)` in nf4; inputs are a multiple of 64.

    Args:
        packed: codes `(experts, numbers / 2)` and scales `(experts, numbers / 64)` uint8, the
            scales' scales `(experts, ceil(numbers / 64 / 256))` and offsets `(experts,)` float32.
        tables: what codes and scales stand for, `(16,)` and `(256,)` float32.
    """
    groups = rows.shape[1] // 64
    sizes = packed[1].shape[1] // groups, groups, 32
    return _multiply_codes(rows, chosen, (*packed, *tables), bias, sizes, NF4_TILE)


def _multiply_codes(
    rows: Tensor,
    chosen: Tensor,
    packed: tuple[Tensor | None, ...],
    bias: Tensor | None,
    sizes: tuple[int, int, int],
    tile: tuple[int, int],
) -> Tensor:
    # `sizes` are outputs, groups of inputs that share a scale, and the bytes of a group's codes.
    pairs, (outputs, groups, nbytes) = len(chosen), sizes
    out = rows.new_empty(pairs, outputs)
    # The two numbers that belong to a byte are read as one.
    pair, number = _NUMBERS[rows.element_size()]
    with torch.cuda.device_of(rows):
        _multiply_packed[pairs, triton.cdiv(outputs, tile[0])](
            rows.contiguous().view(pair), chosen,
            *packed,
            bias, out, pairs // len(rows), outputs, groups,
            NUMBER=number, OUTPUTS=tile[0], GROUPS=tile[1], NBYTES=nbytes,
            num_warps=4,
        )  # fmt: skip
    return out


_NUMBERS = {2: (torch.int32, tl.uint16), 4: (torch.int64, tl.uint32)}


@triton.jit
def _multiply(
    rows, chosen, weights, bias, out, each, outputs, inputs,
    expert_stride, output_stride, input_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
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
    _put(made, bias, out, pair, expert, own, outputs)


@triton.jit
def _multiply_packed(
    rows, chosen, codes, scales, nested, offsets, levels, table, bias, out, each, outputs, groups,
    NUMBER: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, NBYTES: tl.constexpr,
):  # fmt: skip
    """By weights in nf4, or in MXFP4 where there are no `levels`."""
    pair = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = own < outputs
    expert = tl.load(chosen + pair)
    blocks = outputs * groups
    row = rows + pair // each * groups * NBYTES
    offset = 0.0 if levels is None else tl.load(offsets + expert)
    byte = tl.arange(0, NBYTES)[None, None, :]
    sums = tl.zeros([OUTPUTS, GROUPS], tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)[None, :]
        there = real[:, None] & (group < groups)
        block = own[:, None] * groups + group
        at = (expert * blocks + block)[:, :, None] * NBYTES + byte
        both = tl.load(codes + at, mask=there[:, :, None], other=0)
        # Asked for by every output alike, so that a thread has what belongs to its codes.
        at = tl.broadcast_to(group[:, :, None] * NBYTES + byte, (OUTPUTS, GROUPS, NBYTES))
        x = tl.load(row + at, mask=there[:, :, None], other=0)
        low, high = _number(x, NUMBER, out), _number(x >> NUMBER.primitive_bitwidth, NUMBER, out)
        scale = tl.load(scales + expert * blocks + block, mask=there, other=0).to(tl.int32)
        if levels is None:
            both = both.to(tl.uint16)
            products = _e2m1(both) * low + _e2m1(both >> 4) * high
            size = (scale << 23).to(tl.float32, bitcast=True)
        else:
            both = both.to(tl.int32)
            products = tl.load(levels + (both >> 4)) * low + tl.load(levels + (both & 15)) * high
            wide = nested + expert * tl.cdiv(blocks, 256) + block // 256
            size = tl.load(table + scale) * tl.load(wide, mask=there, other=0.0) + offset
        sums += tl.sum(products, axis=2) * size
    made = tl.sum(sums, axis=1)
    if levels is None:
        made *= 16384.0
    _put(made, bias, out, pair, expert, own, outputs)


@triton.jit
def _put(made, bias, out, pair, expert, own, outputs):
    real = own < outputs
    if bias is not None:
        made += tl.load(bias + expert * outputs + own, mask=real, other=0.0).to(tl.float32)
    tl.store(out + pair * outputs + own, made.to(out.dtype.element_ty), mask=real)


@triton.jit
def _number(bits, NUMBER: tl.constexpr, out):
    return bits.to(NUMBER).to(out.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1(codes):
    """A 2^14th of what the lowest four bits stand for: as a float16 they lack its exponent's offset
    alone."""
    return (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32)
