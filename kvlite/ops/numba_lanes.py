"""Vectors as wide as a processor's, in LLVM's language, for what a compiler of loops leaves in
single numbers."""

from typing import Any

from llvmlite import ir

LANES = 16
FLOAT, BYTE, PLACE = ir.FloatType(), ir.IntType(8), ir.IntType(32)
FLOATS, BYTES, PLACES = (ir.VectorType(each, LANES) for each in (FLOAT, BYTE, PLACE))


def place(builder: Any, address: Any, at: int, kind: Any) -> Any:
    """The place so many bytes after an address, of what has a kind."""
    whole = builder.add(address, ir.Constant(address.type, at))
    return builder.inttoptr(whole, kind.as_pointer())


def load(builder: Any, address: Any, at: int, kind: Any) -> Any:
    """What lies there."""
    return builder.load(place(builder, address, at, kind), align=1 if kind is BYTES else 4)


def everywhere(builder: Any, number: Any) -> Any:
    """A number in every lane."""
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(PLACE, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(PLACES, [0] * LANES))


def product_sum(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """`total + one * other`, in one instruction where there is one."""
    product = builder.fmul(one, other, flags=("contract",))
    return builder.fadd(total, product, flags=("contract",))
