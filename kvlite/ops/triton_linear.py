"""Products with packed weights on CUDA: blocks as `ops.blocks` has them, unpacked in registers.

Of a product, a thread takes words of codes, of several outputs at the same inputs.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.blocks import GROUP, BlockFormat
from kvlite.ops.triton_blocks import weights_of
from kvlite.ops.triton_products import SMALL, unit_product

# Outputs and rows of a program, its threads when it multiplies, and groups that it unpacks at once.
OUTPUTS, ROWS, THREADS, GROUPS = 4, 4, 64, 8


def multiply(
    rows: Tensor,
    blocks: Tensor,
    form: BlockFormat,
    chosen: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rows @ weight.T`, `(n, outputs)`, of a few rows `(n, inputs)`; or `weights[e] @ row` for
    each chosen expert e, `(pairs, outputs)`, as `triton_experts.multiply`.

    Args:
        rows: from a multiple of 8 bytes on.
        blocks: `(outputs, bytes of one)` uint8, from a multiple of 4 bytes on; with chosen experts
            `(experts, outputs, bytes of one)`.
        chosen: `(pairs,)` int64, those of the first row first.
        out: where products are written to, if not to a new tensor; neighbors are outputs.
    """
    count, (outputs, width) = len(rows if chosen is None else chosen), blocks.shape[-2:]
    if out is None:
        out = rows.new_empty(count, outputs)
    parts = 4 if form.inputs == GROUP else 16 if form.name in ("Q2_K", "Q3_K", "Q6_K") else 8
    units = width // form.nbytes * parts
    together = min(OUTPUTS, 1 << outputs.bit_length() - 1)
    at_once = min(ROWS, 1 << (count - 1).bit_length()) if chosen is None else 1
    # All of the threads have something to do each time, where sizes allow it.
    threads = min(THREADS, units & -units)
    threads = threads if threads >= 32 else THREADS
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(blocks):
        _multiply[-(-outputs // together), -(-count // at_once)](
            rows.contiguous(), blocks, _levels(form, blocks.device), chosen, out, outputs, count,
            count // len(rows), out.stride(0),
            **_constants(form, width), PARTS=parts, ROWS=at_once, OUTPUTS=together, UNITS=threads,
            num_warps=threads // 32,
        )  # fmt: skip
    return out


def unpack(blocks: Tensor, form: BlockFormat, out: Tensor) -> None:
    """The weights of blocks `(outputs, bytes of one)`, into `(outputs, inputs)` of any floating
    type."""
    outputs, width = blocks.shape
    with torch.cuda.device_of(blocks):
        _unpack[-(-outputs // OUTPUTS), -(-out.shape[1] // (GROUPS * GROUP))](
            blocks, _levels(form, blocks.device), out, outputs,
            **_constants(form, width), OUTPUTS=OUTPUTS, GROUPS=GROUPS,
            num_warps=4,
        )  # fmt: skip


def _constants(form: BlockFormat, width: int) -> dict[str, int | bool]:
    return {
        "WIDTH": width,
        "KIND": form.number,
        "HIGH": form.high_bits > 0,
        "LEAST": form.has_least,
        "INPUTS": form.inputs,
        "NBYTES": form.nbytes,
    }


@cache
def _levels(form: BlockFormat, device: torch.device) -> Tensor | None:
    """What its 16 codes stand for, `(16,)` float32, if not for themselves."""
    return torch.tensor(form.levels, dtype=torch.float32, device=device) if form.levels else None


@triton.jit(do_not_specialize=["outputs", "count", "each", "stride"])
def _multiply(
    rows, blocks, levels, chosen, out, outputs, count, each, stride,
    WIDTH: tl.constexpr, KIND: tl.constexpr, HIGH: tl.constexpr, LEAST: tl.constexpr,
    INPUTS: tl.constexpr, NBYTES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    # A unit is what a thread takes of an output at once, of which a block has `PARTS`.
    total: tl.constexpr = WIDTH // NBYTES * PARTS
    # The last program begins early enough to end with the last output.
    first = tl.minimum(tl.program_id(0) * OUTPUTS, outputs - OUTPUTS)
    own = tl.arange(0, OUTPUTS)[None, :, None]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None, None]
    lines = blocks + first.to(tl.int64) * WIDTH
    if chosen is not None:
        lines += tl.load(chosen + tl.program_id(1)) * outputs * WIDTH
        row = row // each
    inputs = rows + tl.minimum(row, count - 1) * (WIDTH // NBYTES * INPUTS)
    sums = tl.zeros([ROWS, OUTPUTS, UNITS], tl.float32)
    for start in range(0, total, UNITS):
        which = start + tl.arange(0, UNITS)[None, None, :]
        real = which < total
        unit = tl.minimum(which, total - 1) if total % UNITS else which
        block = lines + unit // PARTS * NBYTES + own * WIDTH
        x = inputs + unit // PARTS * INPUTS
        EVEN: tl.constexpr = total % UNITS == 0
        sums += unit_product(x, block, unit % PARTS, real, levels, EVEN, KIND, HIGH, LEAST, INPUTS)
    made = tl.sum(sums, axis=2) * (1 / SMALL)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    own = first + tl.arange(0, OUTPUTS)[None, :]
    tl.store(out + row * stride + own, made.to(out.dtype.element_ty), mask=row < count)


@triton.jit(do_not_specialize=["outputs"])
def _unpack(
    blocks, levels, out, outputs,
    WIDTH: tl.constexpr, KIND: tl.constexpr, HIGH: tl.constexpr, LEAST: tl.constexpr,
    INPUTS: tl.constexpr, NBYTES: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total: tl.constexpr = WIDTH // NBYTES * INPUTS
    weights, at = weights_of(
        blocks, levels, own, outputs, tl.program_id(1) * GROUPS, WIDTH, KIND, HIGH, LEAST, INPUTS,
        NBYTES, total, GROUPS,
    )  # fmt: skip
    line = own.to(tl.int64)[:, None, None] * total
    real = (own < outputs)[:, None, None] & (at < total)
    tl.store(out + line + at, weights.to(out.dtype.element_ty), mask=real)
