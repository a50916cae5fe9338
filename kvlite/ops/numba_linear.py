"""Products with packed weights on a CPU, compiled by numba: blocks as `ops.blocks` has them.

Bytes lie input by input, so that loops go over outputs, whose sums are independent of each other:
they are the same with any number of threads, and beside any other rows.
"""

import numpy as np
from numba import carray, from_dtype, types
from torch import Tensor

from kvlite.ops.blocks import GROUP, Q4_0, Q4_1, Q5_1, Q8_0, BlockFormat
from kvlite.ops.numba_blocks import has_halves, read_base, read_codes, read_scales
from kvlite.ops.numba_group import INPUTS, WIDTH, adding
from kvlite.ops.numba_jit import jitted, jitted_in_order
from kvlite.ops.numba_llvm import bytes_at, floats_at
from kvlite.ops.numba_threads import board, helpers, reading, share, work

Array = np.ndarray
# A product as compiled loops take it: where its blocks and its bias are, if it has one.
PRODUCT = np.dtype(
    [
        (name, np.int64)
        for name in ("blocks", "lines", "outputs", "bias", "kind", "inputs", "nbytes")
    ]
)
Product = tuple[int, ...]
# As many products may have the same rows.
TOGETHER = 3
HALF = INPUTS
# Outputs whose codes and sums stay in the processor's cache.
BLOCK = 1 << 10
# Rows for which codes become numbers once.
ROWS = 4
LESS = np.float32(1 / 16)
# Weights that are worth a thread's looking for them.
WORTH = 1 << 16


def product(blocks: Tensor, form: BlockFormat, bias: Tensor | None = None) -> Product:
    """What `joined` takes: blocks `(bytes of an output, outputs)`, and a bias `(outputs,)`
    float32."""
    added = 0 if bias is None else bias.data_ptr()
    return blocks.data_ptr(), *blocks.shape, added, form.number, form.inputs, form.nbytes


def joined(*products: Product) -> Array:
    """What `multiply` takes: up to `TOGETHER` products with the same rows, `(TOGETHER,)` of
    `PRODUCT`. Who has it holds their tensors."""
    made = np.zeros(TOGETHER, PRODUCT)
    made[: len(products)] = [*products]
    return made


def products_of(given: Array, rows: Array) -> Array:
    """Products `(n, outputs)` float32 of contiguous rows `(n, inputs)` float32."""
    out: Array = multiply(rows, given, multiplying(), board())
    return out


def unpack(blocks: Tensor, form: BlockFormat, first: int, last: int, out: Tensor) -> None:
    """The weights of outputs from `first` to before `last`, into `(inputs, last - first)` float32,
    of a `Product`'s."""
    unpack_part(blocks.numpy(), form.number, form.inputs, form.nbytes, first, last, out.numpy())


_SUMS, _PAIR = types.float32[:, ::1], types.UniTuple(types.float32[:, ::1], 2)
_given = reading(
    types.Tuple((_PAIR, _PAIR, from_dtype(PRODUCT)[::1], _SUMS, types.int64, types.int64))
)


@jitted_in_order
def multiply(rows, products, multiplying, board):
    """Results `(n, all outputs)` of products with the same rows `(n, inputs)`, one after the other,
    by all threads of a board; `multiplying` is what the function of that name gives."""
    outputs, count, bytewise, direct = 0, 0, False, False
    for product in products:
        outputs += product.outputs
        count += _columns(product)
        if product.outputs:
            bytewise |= product.kind in (Q4_0, Q4_1)
            direct |= product.kind not in (Q4_0, Q4_1)
    out = np.empty((len(rows), outputs), np.float32)
    low, whole = _factors(rows, True, bytewise), _factors(rows, False, direct)
    parts = min(helpers(board) + 1, outputs * rows.shape[1] // WORTH)
    parts = max(parts, outputs // BLOCK) if parts > 1 else 1
    share(board, multiplying, (low, whole, products, out, count, parts), parts)
    return out


@work
def multiplying(address, part):
    """Part of the work of `multiply`."""
    low, whole, products, out, count, parts = _given(address)
    first, last = count * part // parts, count * (part + 1) // parts
    _multiply_columns(low, whole, products, out, first, last)


@jitted
def _columns(product):
    return -(-product.outputs // WIDTH)


@jitted_in_order
def _multiply_columns(low, whole, products, out, first, last):
    at = 0
    for product in products:
        outputs = product.outputs
        part = max(first, 0) * WIDTH, min(last * WIDTH, outputs)
        if part[0] < part[1]:
            factors, totals = low if product.kind in (Q4_0, Q4_1) else whole
            _multiply_part(factors, totals, product, part, out[:, at : at + outputs])
        at += outputs
        first, last = first - _columns(product), last - _columns(product)


@jitted_in_order
def _multiply_part(factors, totals, product, part, out):
    kind, inputs, nbytes, (first, last) = product.kind, product.inputs, product.nbytes, part
    blocks = carray(bytes_at(product.blocks), (product.lines, product.outputs))
    bytewise, direct = kind in (Q4_0, Q4_1), kind in (Q4_0, Q4_1, Q8_0)
    width = -(-min(last - first, BLOCK) // WIDTH) * WIDTH
    codes, sums = np.empty((GROUP, width), np.uint8), np.empty((len(factors), width), np.float32)
    base = np.empty((2, width), np.float32)
    scales = base if kind in (Q4_1, Q5_1) else np.empty((2, width), np.float32)
    for begin in range(first, last, BLOCK):
        end, at = min(begin + BLOCK, last), 0
        sums[:] = 0
        whole = direct and (end - begin) % WIDTH == 0
        for number in range(blocks.shape[0] // nbytes):
            block = blocks[number * nbytes : (number + 1) * nbytes, begin:end]
            lines = block[nbytes - (HALF if bytewise else GROUP) :]
            read_base(block, kind, base)
            for group in range(inputs // GROUP):
                if whole:
                    place, step, soon = lines.ctypes.data, blocks.shape[1], nbytes * blocks.shape[1]
                else:
                    place, step, soon = codes.ctypes.data, width, 0
                    if direct:
                        _copy(lines, codes)
                    else:
                        read_codes(block, kind, group, codes)
                for half in range(1 if bytewise else 2):
                    if half == 0 or has_halves(kind):
                        read_scales(block, kind, group, half, base, scales)
                    lies = place + half * HALF * step
                    _add(lies, step, soon, bytewise, factors, totals, at, scales, sums, end - begin)
                    at += 1
        _copy(sums[:, : end - begin], out[:, begin:end])
        if product.bias:
            bias = carray(floats_at(product.bias), product.outputs)
            for row in range(len(out)):
                for k in range(begin, end):
                    out[row, k] += bias[k]


@jitted
def _copy(of, to):
    """Copy lines to as many of others, whose rest stays; numba's own way takes long to compile."""
    for i in range(of.shape[0]):
        for k in range(of.shape[1]):
            to[i, k] = of[i, k]


@jitted_in_order
def _factors(rows, bytewise, wanted):
    # Where the low halves of bytes are the codes of 16 inputs, and the high ones those of the next
    # 16, each low half has a factor, and the byte, which is a sum of both halves.
    if not wanted:
        return np.empty((0, 0), np.float32), np.empty((0, 0), np.float32)
    shared = 2 * HALF if bytewise else HALF
    factors, totals = rows.copy(), np.zeros((rows.shape[1] // shared, len(rows)), np.float32)
    for row in range(len(rows)):
        for at in range(rows.shape[1]):
            totals[at // shared, row] += rows[row, at]
        if bytewise:
            for at in range(rows.shape[1] // 2):
                near = at // HALF * GROUP + at % HALF
                second = rows[row, near + HALF] * LESS
                factors[row, 2 * at], factors[row, 2 * at + 1] = rows[row, near] - second, second
    return factors, totals


_add_bytes, _add_codes = adding(1, True), adding(1, False)
_add_bytes_4, _add_codes_4 = adding(ROWS, True), adding(ROWS, False)


@jitted_in_order
def _add(place, step, soon, bytewise, factors, totals, at, scales, sums, outputs):
    each, row, of_inputs = 4, 0, factors.shape[1] * 4
    scale, offset = scales[0].ctypes.data, scales[1].ctypes.data
    size = 2 * HALF if bytewise else HALF
    while row < len(factors):
        x, total = factors[row, at * size :].ctypes.data, totals[at, row:].ctypes.data
        to, of_sums = sums[row].ctypes.data, sums.shape[1] * each
        if row + ROWS <= len(factors):
            for k in range(0, outputs, WIDTH // 2):
                own = place + k, step, soon, x, of_inputs
                so_far = scale + each * k, offset + each * k, total, to + each * k, of_sums
                if bytewise:
                    _add_bytes_4(*own, *so_far)
                else:
                    _add_codes_4(*own, *so_far)
            row += ROWS
        else:
            for k in range(0, outputs, WIDTH):
                own = place + k, step, soon, x, of_inputs
                so_far = scale + each * k, offset + each * k, total, to + each * k, of_sums
                if bytewise:
                    _add_bytes(*own, *so_far)
                else:
                    _add_codes(*own, *so_far)
            row += 1


@jitted
def unpack_part(blocks, kind, inputs, nbytes, first, last, out):
    """As `unpack`, in compiled code."""
    codes = np.empty((GROUP, -(-(last - first) // WIDTH) * WIDTH), np.uint8)
    base = np.empty((2, last - first), np.float32)
    scales = base if kind in (Q4_1, Q5_1) else np.empty((2, last - first), np.float32)
    for number in range(blocks.shape[0] // nbytes):
        block = blocks[number * nbytes : (number + 1) * nbytes, first:last]
        read_base(block, kind, base)
        for group in range(inputs // GROUP):
            read_codes(block, kind, group, codes)
            for i in range(GROUP):
                if i % HALF == 0:
                    read_scales(block, kind, group, i // HALF, base, scales)
                made, line = out[number * inputs + group * GROUP + i], codes[i]
                scale, offset = scales[0], scales[1]
                for k in range(made.size):
                    made[k] = np.float32(line[k]) * scale[k] + offset[k]
