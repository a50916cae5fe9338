"""Products of bfloat16 numbers on a CPU, summed in float32: tiles of rows by columns that stay in
the processor's registers (AVX512_BF16).

Both sides have their numbers in pairs that follow each other along what is summed: a row's lie side
by side, and `COLUMNS` columns' likewise, a pair of each, then the next pair of each.
"""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_llvm import FLOATS, LANES, PLACE, everywhere

# Sums of a tile, in vectors: 24 of 32 registers.
ROWS, VECTORS = 6, 4
COLUMNS = VECTORS * LANES
_WHOLE = ir.IntType(64)


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)
_ADDING = ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS])


def _tile(adds: bool) -> Any:
    """Make `add_tile`, or what sets sums instead of adding to them."""

    @intrinsic
    def tile(context, rows, row_bytes, columns, pairs, out, out_bytes):
        return types.void(*(types.int64,) * 6), partial(_write_tile, adds)

    return tile


def _write_tile(adds: bool, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    rows, row_bytes, columns, pairs, out, out_bytes = arguments
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    add = builder.module.globals.get(name) or ir.Function(builder.module, _ADDING, name)

    def at(address: Any, size: int, count: Any, kind: Any) -> Any:
        whole = builder.mul(count, ir.Constant(_WHOLE, size))
        return builder.inttoptr(builder.add(address, whole), kind.as_pointer())

    def lines(address: Any, step: Any) -> list[Any]:
        counts = (ir.Constant(_WHOLE, row) for row in range(ROWS))
        return [builder.add(address, builder.mul(step, count)) for count in counts]

    places = [
        [at(line, 4 * LANES, ir.Constant(_WHOLE, vector), FLOATS) for vector in range(VECTORS)]
        for line in lines(out, out_bytes)
    ]
    nothing = ir.Constant(FLOATS, [0.0] * LANES)
    before = [
        [builder.load(place, align=4) if adds else nothing for place in line] for line in places
    ]
    from_rows, begin = lines(rows, row_bytes), builder.block
    loop, after = (builder.append_basic_block(each) for each in ("pairs", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(_WHOLE)
    pair.add_incoming(ir.Constant(_WHOLE, 0), begin)
    sums = [[builder.phi(FLOATS) for _ in range(VECTORS)] for _ in range(ROWS)]
    start = builder.add(columns, builder.mul(pair, ir.Constant(_WHOLE, 4 * COLUMNS)))
    own = [
        builder.load(at(start, 4 * LANES, ir.Constant(_WHOLE, vector), _PAIRS), align=4)
        for vector in range(VECTORS)
    ]
    for line, row_sums, row_before in zip(from_rows, sums, before, strict=True):
        number = builder.load(at(line, 4, pair, PLACE), align=4)
        number = builder.bitcast(everywhere(builder, number), _PAIRS)
        for total, other, first in zip(row_sums, own, row_before, strict=True):
            total.add_incoming(first, begin)
            total.add_incoming(builder.call(add, [total, other, number]), loop)
    following = builder.add(pair, ir.Constant(_WHOLE, 1))
    pair.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)
    builder.position_at_end(after)
    for row_places, row_sums in zip(places, sums, strict=True):
        for place, total in zip(row_places, row_sums, strict=True):
            builder.store(total.incomings[1][0], place, align=4)
    return context.get_dummy_value()


set_tile, add_tile = _tile(False), _tile(True)


@jitted
def to_bfloat16(number):
    """The bits of the bfloat16 number nearest to one in float32."""
    bits = np.float32(number).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
