"""Numbers at an address, for compiled loops that are told where things lie."""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic


def _pointer(kind: Any) -> Callable[..., Any]:
    @intrinsic
    def pointer(context, address):
        return types.CPointer(kind)(types.int64), _as_pointer

    return pointer  # type: ignore[no-any-return]


def _as_pointer(context, builder, signature, arguments):
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


floats_at, places_at, words_at = map(_pointer, (types.float32, types.int32, types.uint64))
bytes_at, halves_at = _pointer(types.uint8), _pointer(types.uint16)
