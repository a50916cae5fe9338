"""What compiled loops have in LLVM's own language: vectors as wide as a processor's, for what a
compiler of loops leaves in single numbers, and numbers at an address that they are told."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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


_FETCHING = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), PLACE, PLACE, PLACE])


def write_fetch(builder: Any, address: Any) -> None:
    """Write the instruction that brings the bytes around an address nearer to the processor; it
    may be no address at all."""
    name = "llvm.prefetch.p0"
    fetching = builder.module.globals.get(name) or ir.Function(builder.module, _FETCHING, name)
    how = [ir.Constant(PLACE, each) for each in (0, 2, 1)]
    builder.call(fetching, [place(builder, address, 0, BYTE), *how])


def _pointer(kind: Any) -> Callable[..., Any]:
    def as_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    @intrinsic
    def pointer(context, address):
        return types.CPointer(kind)(types.int64), as_pointer

    return pointer  # type: ignore[no-any-return]


floats_at, places_at, words_at = map(_pointer, (types.float32, types.int32, types.uint64))
bytes_at, halves_at = _pointer(types.uint8), _pointer(types.uint16)
