"""Products of many rows with packed weights on a CPU that multiplies bfloat16 numbers: weights of
some outputs are unpacked once for all rows, next to where they are multiplied."""

import numpy as np
import torch
from torch import Tensor

from kvlite.ops.blocks import BlockFormat
from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_linear import unpack_part
from kvlite.ops.numba_quant import in_turn
from kvlite.ops.numba_tiles import COLUMNS, ROWS, rounded, set_tile


def multiply(rows: Tensor, blocks: Tensor, form: BlockFormat, out: Tensor) -> None:
    """Write the products, `(n, outputs)` float32, of rows with packed weights.

    Args:
        rows: `(n, inputs)` bfloat16, contiguous, at least `ROWS`; the inputs are even in number.
        blocks: `(bytes of an output, outputs)` uint8, of at least `COLUMNS` outputs.
    """
    numbers, made = rows.view(torch.uint16).numpy(), out.numpy()
    given = blocks.numpy(), form.number, form.inputs, form.nbytes
    columns = range(0, out.shape[1], COLUMNS)
    in_turn(lambda first: _multiply(numbers, *given, first, made), columns)


@jitted
def _multiply(rows, blocks, kind, inputs, nbytes, first, out):
    """Of `COLUMNS` outputs from `first` on, or of the last ones."""
    count, width = rows.shape
    first = min(first, out.shape[1] - COLUMNS)
    weights = np.empty((width, COLUMNS), np.float32)
    unpack_part(blocks, kind, inputs, nbytes, first, first + COLUMNS, weights)
    columns = np.empty((width // 2, COLUMNS, 2), np.uint16)
    for pair in range(width // 2):
        for k in range(COLUMNS):
            columns[pair, k, 0] = rounded(weights[2 * pair, k])
            columns[pair, k, 1] = rounded(weights[2 * pair + 1, k])
    for begin in range(0, count, ROWS):
        row = min(begin, count - ROWS)
        set_tile(
            rows.ctypes.data + row * rows.strides[0],
            rows.strides[0],
            columns.ctypes.data,
            width // 2,
            out.ctypes.data + row * out.strides[0] + first * 4,
            out.strides[0],
        )
