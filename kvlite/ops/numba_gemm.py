"""Products of many rows with packed weights on a CPU that multiplies bfloat16 numbers: weights of
some outputs are unpacked once for all rows, next to where they are multiplied."""

import numpy as np
import torch
from numba import types
from torch import Tensor

from kvlite.ops.blocks import BlockFormat
from kvlite.ops.numba_linear import unpack_part
from kvlite.ops.numba_threads import board, reading, share, work
from kvlite.ops.numba_tiles import COLUMNS, ROWS, set_tile, to_bfloat16


def multiply(rows: Tensor, blocks: Tensor, form: BlockFormat, out: Tensor) -> None:
    """Write the products, `(n, outputs)` float32, of contiguous rows `(n, inputs)` bfloat16, at
    least `ROWS` of an even number of inputs, with packed weights `(bytes of an output, outputs)`
    uint8, of at least `COLUMNS` outputs."""
    given = blocks.numpy(), form.number, form.inputs, form.nbytes
    parts = -(-out.shape[1] // COLUMNS)
    arrays = rows.view(torch.uint16).numpy(), *given, out.numpy()
    share(board(parts), multiplying_many(), arrays, parts)


_SIZE = types.int64
_given = reading(
    types.Tuple(
        (types.uint16[:, ::1], types.uint8[:, ::1], _SIZE, _SIZE, _SIZE, types.float32[:, ::1])
    )
)


@work
def multiplying_many(address, part):
    """Part of the work of `multiply`: of the part's `COLUMNS` outputs, or of the last ones."""
    rows, blocks, kind, inputs, nbytes, out = _given(address)
    (count, width), first = rows.shape, min(part * COLUMNS, out.shape[1] - COLUMNS)
    weights = np.empty((width, COLUMNS), np.float32)
    unpack_part(blocks, kind, inputs, nbytes, first, first + COLUMNS, weights)
    columns = np.empty((width // 2, COLUMNS, 2), np.uint16)
    for pair in range(width // 2):
        for k in range(COLUMNS):
            columns[pair, k, 0] = to_bfloat16(weights[2 * pair, k])
            columns[pair, k, 1] = to_bfloat16(weights[2 * pair + 1, k])
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
