"""The innermost loop of products with packed weights, in LLVM's vectors: a compiler of loops leaves
sums in memory, and fetches each row of bytes only when it is needed."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvlite.ops.numba_llvm import (
    BYTES,
    FLOAT,
    FLOATS,
    LANES,
    PLACE,
    everywhere,
    load,
    place,
    product_sum,
    write_fetch,
)

# Inputs whose codes are added up at once, and how many outputs they have then.
INPUTS = 16
WIDTH = 64


def adding(rows: int, bytewise: bool) -> Callable[..., Any]:
    """What adds the products of some rows with `INPUTS` lines of codes to their sums; its arguments
    are addresses and distances in bytes:

    lines, to the next line, to what is needed soon: `WIDTH // min(rows, 2)` codes of an output each
    or, bytewise, codes of two inputs in a byte, 16 inputs apart; factors, to the next row's: one an
    input, float32; bytewise two, of low halves and of whole bytes; scales, offsets: of outputs,
    float32; totals: what offsets are multiplied by, `(rows,)` float32; sums, to the next row's:
    float32.

    The same sums in the same order with any number of rows.
    """

    @intrinsic
    def add(context, lines, step, soon, factors, row, scales, offsets, totals, sums, sums_row):
        def generate(context, builder, signature, arguments):
            _Adding(builder, rows, bytewise).write(arguments)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 10), generate

    return add  # type: ignore[no-any-return]


def looking_up(levels: Sequence[int]) -> Callable[..., Any]:
    """What replaces `WIDTH` codes of 4 bits at an address, uint8, by what they stand for.

    LLVM makes one instruction of a vector's where a processor has one.
    """

    @intrinsic
    def look_up(context, codes):
        def generate(context, builder, signature, arguments):
            for at in range(0, WIDTH, LANES):
                lies = place(builder, arguments[0], at, BYTES)
                builder.store(
                    _looked_up(builder, levels, builder.load(lies, align=1)), lies, align=1
                )
            return context.get_dummy_value()

        return types.void(types.intp), generate

    return look_up  # type: ignore[no-any-return]


def _looked_up(builder: Any, levels: Sequence[int], codes: Any) -> Any:
    table, found = ir.Constant(BYTES, levels), ir.Constant(BYTES, ir.Undefined)
    codes = builder.and_(codes, ir.Constant(BYTES, [15] * LANES))
    for lane in (ir.Constant(PLACE, each) for each in range(LANES)):
        level = builder.extract_element(table, builder.extract_element(codes, lane))
        found = builder.insert_element(found, level, lane)
    return found


class _Adding:
    def __init__(self, builder: Any, rows: int, bytewise: bool) -> None:
        self.builder, self.rows, self.bytewise = builder, rows, bytewise
        self.parts = range(WIDTH // min(rows, 2) // LANES)

    def write(self, addresses: Any) -> None:
        """Write it for what `adding` says."""
        lines, step, soon, factors, row, scales, offsets, totals, sums, sums_row = addresses
        b, rows, parts = self.builder, range(self.rows), self.parts
        made = [[ir.Constant(FLOATS, [0.0] * LANES) for _ in parts] for _ in rows]
        low = ir.Constant(BYTES, [15] * LANES)
        for i in range(INPUTS):
            line = b.add(lines, b.mul(step, self._number(i)))
            write_fetch(b, b.add(line, soon))
            codes = [load(b, line, LANES * part, BYTES) for part in parts]
            read = [[b.and_(each, low) for each in codes], codes] if self.bytewise else [codes]
            numbers = [[b.uitofp(each, FLOATS) for each in side] for side in read]
            for r in rows:
                own = b.add(factors, b.mul(row, self._number(r)))
                for at, side in enumerate(numbers, len(read) * i):
                    factor = everywhere(b, load(b, own, 4 * at, FLOAT))
                    for part in parts:
                        made[r][part] = product_sum(b, made[r][part], factor, side[part])
        for part in parts:
            at = 4 * LANES * part
            scale, offset = load(b, scales, at, FLOATS), load(b, offsets, at, FLOATS)
            for r in rows:
                to = place(b, b.add(sums, b.mul(sums_row, self._number(r))), at, FLOATS)
                total = product_sum(b, b.load(to, align=4), made[r][part], scale)
                shared = everywhere(b, load(b, totals, 4 * r, FLOAT))
                b.store(product_sum(b, total, shared, offset), to, align=4)

    def _number(self, value: int) -> Any:
        return ir.Constant(ir.IntType(64), value)
