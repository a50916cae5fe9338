"""Products with packed weights on CUDA: blocks as `ops.blocks` has them, unpacked in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.blocks import FORMATS, GROUP, BlockFormat

Q6_K, Q8_0 = tl.constexpr(FORMATS["Q6_K"].number), tl.constexpr(FORMATS["Q8_0"].number)
SIZE = tl.constexpr(GROUP)
# Outputs and groups of inputs that a program has in registers at once.
OUTPUTS, GROUPS = 4, 8


def multiply(rows: Tensor, blocks: Tensor, form: BlockFormat) -> Tensor:
    """`rows @ weight.T`, `(n, outputs)`, of a few rows `(n, inputs)`.

    Args:
        blocks: `(outputs, bytes of one)` uint8.
    """
    outputs, width = blocks.shape
    out = rows.new_empty(len(rows), outputs)
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(blocks):
        _multiply[-(-outputs // OUTPUTS), len(rows)](
            rows.contiguous(),
            blocks,
            out,
            outputs,
            **_constants(form, width),
            num_warps=4,
        )
    return out


def unpack(blocks: Tensor, form: BlockFormat, out: Tensor) -> None:
    """The weights of blocks `(outputs, bytes of one)`, into `(outputs, inputs)` of any floating
    type."""
    outputs, width = blocks.shape
    with torch.cuda.device_of(blocks):
        _unpack[-(-outputs // OUTPUTS), -(-out.shape[1] // (GROUPS * GROUP))](
            blocks,
            out,
            outputs,
            **_constants(form, width),
            num_warps=4,
        )


def _constants(form: BlockFormat, width: int) -> dict[str, int | bool]:
    """What a kernel is compiled for, of blocks with `width` bytes an output."""
    return {
        "WIDTH": width,
        "KIND": form.number,
        "HIGH": form.high_bits > 0,
        "LEAST": form.has_least,
        "INPUTS": form.inputs,
        "NBYTES": form.nbytes,
        "OUTPUTS": OUTPUTS,
        "GROUPS": GROUPS,
    }


@triton.jit(do_not_specialize=["outputs"])
def _multiply(
    rows,
    blocks,
    out,
    outputs,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HIGH: tl.constexpr,
    LEAST: tl.constexpr,
    INPUTS: tl.constexpr,
    NBYTES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One row's products with some outputs."""
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1).to(tl.int64)
    total: tl.constexpr = WIDTH // NBYTES * INPUTS
    sums = tl.zeros([OUTPUTS, GROUPS, SIZE], tl.float32)
    for first in range(0, total // SIZE, GROUPS):
        weights, at = _weights(
            blocks, own, outputs, first, WIDTH, KIND, HIGH, LEAST, INPUTS, NBYTES, total, GROUPS
        )
        x = tl.load(rows + row * total + at, mask=at < total, other=0.0).to(tl.float32)
        sums += weights * x
    made = tl.sum(tl.sum(sums, axis=2), axis=1)
    tl.store(out + row * outputs + own, made.to(out.dtype.element_ty), mask=own < outputs)


@triton.jit(do_not_specialize=["outputs"])
def _unpack(
    blocks,
    out,
    outputs,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HIGH: tl.constexpr,
    LEAST: tl.constexpr,
    INPUTS: tl.constexpr,
    NBYTES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Some inputs of some outputs."""
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total: tl.constexpr = WIDTH // NBYTES * INPUTS
    weights, at = _weights(
        blocks,
        own,
        outputs,
        tl.program_id(1) * GROUPS,
        WIDTH,
        KIND,
        HIGH,
        LEAST,
        INPUTS,
        NBYTES,
        total,
        GROUPS,
    )
    line = own.to(tl.int64)[:, None, None] * total
    real = (own < outputs)[:, None, None] & (at < total)
    tl.store(out + line + at, weights.to(out.dtype.element_ty), mask=real)


@triton.jit
def _weights(
    blocks,
    own,
    outputs,
    first,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HIGH: tl.constexpr,
    LEAST: tl.constexpr,
    INPUTS: tl.constexpr,
    NBYTES: tl.constexpr,
    total: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The weights of some outputs and groups from `first` on, `(outputs, groups, 32)`, 0 beyond the
    last; and the numbers of their inputs, `(1, groups, 32)`."""
    which = first + tl.arange(0, GROUPS)[None, :, None]
    group, i = which % (INPUTS // SIZE), tl.arange(0, SIZE)[None, None, :]
    lines = blocks + own.to(tl.int64)[:, None, None] * WIDTH
    block = lines + which // (INPUTS // SIZE) * NBYTES
    whole = (own < outputs)[:, None, None] & (which * SIZE < total)
    real = whole & (i >= 0)
    if KIND == Q8_0:
        codes = tl.load(block + 2 + i, mask=real, other=0).to(tl.int8, bitcast=True)
        weights = _half(block, whole) * codes.to(tl.float32)
    elif KIND == Q6_K:
        far, near = group // 4, group % 4
        codes = tl.load(block + 64 * far + 32 * (near % 2) + i, mask=real, other=0)
        high = tl.load(block + 128 + 32 * far + i, mask=real, other=0)
        codes = ((codes >> 4 * (near // 2)) & 15) | (((high >> 2 * near) & 3) << 4)
        steps = tl.load(block + 192 + 2 * group + i // 16, mask=real, other=0)
        scale = _half(block + 208, whole) * steps.to(tl.int8, bitcast=True).to(tl.float32)
        weights = scale * (codes.to(tl.float32) - 32)
    elif INPUTS > SIZE:
        start: tl.constexpr = 48 if HIGH else 16
        codes = tl.load(block + start + 32 * (group // 2) + i, mask=real, other=0)
        codes = (codes >> 4 * (group % 2)) & 15
        if HIGH:
            high = tl.load(block + 16 + i, mask=real, other=0)
            codes = codes | (((high >> group) & 1) << 4)
        low = tl.load(block + 4 + group % 4, mask=whole, other=0)
        least = tl.load(block + 8 + group % 4, mask=whole, other=0)
        both = tl.load(block + 12 + group % 4, mask=whole, other=0)
        step = tl.where(group < 4, low & 63, (both & 15) | ((low >> 2) & 48))
        by = tl.where(group < 4, least & 63, (both >> 4) | ((least >> 2) & 48))
        scale = _half(block, whole) * step.to(tl.float32)
        weights = scale * codes.to(tl.float32) - _half(block + 2, whole) * by.to(tl.float32)
    else:
        minimum: tl.constexpr = 2 if LEAST else 0
        five: tl.constexpr = 4 if HIGH else 0
        codes = tl.load(block + 2 + minimum + five + i % 16, mask=real, other=0)
        codes = (codes >> 4 * (i // 16)) & 15
        if HIGH:
            high = tl.load(block + 2 + minimum + i // 8, mask=real, other=0)
            codes = codes | (((high >> i % 8) & 1) << 4)
        scale = _half(block, whole)
        offset = _half(block + 2, whole) if LEAST else scale * (-16 if HIGH else -8)
        weights = scale * codes.to(tl.float32) + offset
    return weights, which * SIZE + i


@triton.jit
def _half(at, mask):
    """The float16 at some bytes."""
    low = tl.load(at, mask=mask, other=0).to(tl.uint16)
    high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)
