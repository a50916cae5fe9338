"""Loops that numba compiles before they are used, with the types that they are used with."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from numba import from_dtype, types
from numba.core import event

from kvlite.ops.device import has_bfloat16
from kvlite.ops.loops import Loops
from kvlite.ops.numba_gemm import multiplying_many
from kvlite.ops.numba_layer_ops import NORM, to_heads, to_hidden
from kvlite.ops.numba_linear import PRODUCT, multiply, multiplying, unpack_part
from kvlite.ops.numba_quant import dotting, weighing
from kvlite.ops.numba_recall import fill
from kvlite.ops.numba_rows import KINDS, WORKS, Given, share_heads
from kvlite.ops.numba_search import add, search
from kvlite.ops.numba_step import through_all
from kvlite.ops.numba_threads import help_others

Compiling = Callable[[], Any]
_REAL, _WHOLE = types.float32, types.int64
_LINES, _VECTORS, _BOARD = _REAL[:, ::1], _REAL[:, :, ::1], _WHOLE[::1]
_PAIR, _TABLES = types.UniTuple(_WHOLE, 2), (_VECTORS, _VECTORS)


def compile_all(loops: Sequence[Loops], wanted: Callable[[], bool] = lambda: True) -> None:
    """Compile loops, or take them from the disk, as long as they are `wanted`; those that a prompt
    needs first."""
    stopping = _Stopping(wanted)
    with event.install_listener("numba:run_pass", stopping):
        for compiled in [each for one in loops for each in _COMPILED[one]()]:
            if not wanted():
                return
            compiled()


class _Stopping(event.Listener):  # type: ignore[misc]
    """Ends what this thread compiles where it is no longer wanted."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted, self._thread = wanted, threading.get_ident()

    def on_start(self, event: Any) -> None:
        if threading.get_ident() == self._thread and not self._wanted():
            raise RuntimeError("nobody waits for it")

    def on_end(self, event: Any) -> None:
        pass


def _packed() -> Iterator[Compiling]:
    products = from_dtype(PRODUCT)
    yield _typed(unpack_part, types.uint8[:, ::1], *(_WHOLE,) * 5, _LINES)
    if has_bfloat16():
        yield multiplying_many
    yield multiplying
    yield _typed(help_others, _BOARD)
    yield _typed(multiply, _LINES, products[::1], _WHOLE, _BOARD)
    weights = from_dtype(NORM)[::1], products[:, ::1]
    yield _typed(to_heads, *weights, _PAIR, _LINES, *_TABLES, _WHOLE, _BOARD)
    yield _typed(to_hidden, *weights, _LINES, _LINES, _WHOLE, _BOARD)
    kinds = dict(zip(Given._fields, KINDS, strict=True))
    lines, layers = _WHOLE[:, :, ::1], (from_dtype(NORM)[:, ::1], products[:, :, ::1])
    counted = kinds["recalling"], lines, types.int32[:, :, :, ::1], _WHOLE
    given = _LINES, *_TABLES, _REAL, lines, kinds["sinks"], *counted
    yield _typed(through_all, *layers, _PAIR, *given, _WHOLE, _WHOLE, _BOARD)


def _step() -> Iterator[Compiling]:
    yield WORKS[False, False]
    yield _typed(share_heads, _BOARD, _WHOLE, types.NamedTuple(KINDS, Given))


def _recall() -> Iterator[Compiling]:
    signs = types.uint64[:, :, ::1]
    yield _typed(search, _VECTORS, _LINES, signs, _LINES, _WHOLE, _WHOLE)
    yield _typed(add, _VECTORS, _LINES, _LINES, signs, _LINES, _WHOLE)
    yield WORKS[True, False]


def _recall_alone() -> Iterator[Compiling]:
    places, halves = types.int32[:, ::1], types.uint16[:, :, ::1]
    side = types.uint8[:, :, ::1], halves, halves
    packed = types.Tuple((*side, *side, places, _LINES, _WHOLE))
    own = types.Tuple((_VECTORS, _VECTORS, places))
    held = types.Tuple((own, packed, types.UniTuple(_WHOLE, 3)))
    yield _typed(fill, _VECTORS, _LINES, _BOARD, held, held, _VECTORS, *(_WHOLE,) * 5)


def _codes() -> Iterator[Compiling]:
    yield WORKS[False, True]
    yield dotting
    yield weighing


def _typed(loop: Any, *given: Any) -> Compiling:
    return partial(loop.compile, given)


_COMPILED: dict[Loops, Callable[[], Iterator[Compiling]]] = {
    Loops.PACKED: _packed,
    Loops.STEP: _step,
    Loops.CODES: _codes,
    Loops.RECALL: _recall,
    Loops.CODES_BACK: lambda: iter([WORKS[True, True]]),
    Loops.RECALL_ALONE: _recall_alone,
}
