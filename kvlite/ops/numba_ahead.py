"""What recall needs on a CPU, compiled by numba before it is used."""

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import typeof, types

from kvlite.ops.numba_recall import fill
from kvlite.ops.numba_rows import WORKS
from kvlite.ops.numba_search import add, search


def compile_all(wanted: Callable[[], bool], everything: bool, filled: tuple[Any, ...]) -> None:
    """Compile what recall needs, or take it from the disk, as long as it is `wanted`: one loop at a
    time, so that little is left to wait for.

    Args:
        everything: also for entries that are quantized, and for layers that hold so much that they
            are not one call's work.
        filled: what `fill` is given, of types alone.
    """
    real, whole = types.float32, types.int64
    lines, blocks, signs = real[:, ::1], real[:, :, ::1], types.uint64[:, :, ::1]
    loops: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (search, (blocks, lines, signs, lines, whole, whole)),
        (add, (blocks, lines, lines, signs, lines, whole)),
        (fill, tuple(map(typeof, filled))),
    )
    compiling: list[Callable[[], Any]] = [partial(loop.compile, given) for loop, given in loops]
    for compiled in [*compiling, WORKS[True, False], *([WORKS[True, True]] if everything else [])]:
        if not wanted():
            return
        compiled()
