"""What recall needs on a CPU, compiled by numba before it is used."""

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import types

from kvlite.ops.numba_codes import put, restore
from kvlite.ops.numba_recall import fill, products_of
from kvlite.ops.numba_rows import fetch_exact, fetch_packed
from kvlite.ops.numba_search import add, search


def compile_all(wanted: Callable[[], bool], everything: bool) -> None:
    """Compile what recall needs, or take it from the disk, as long as it is `wanted`: one loop at a
    time, so that little is left to wait for.

    Args:
        everything: also for entries that are quantized, and for layers that hold so much that they
            are not one call's work.
    """
    real, whole, place, byte = types.float32, types.int64, types.int32, types.uint8
    line, lines, blocks = real[::1], real[:, ::1], real[:, :, ::1]
    codes, halves = byte[:, :, ::1], types.uint16[:, :, ::1]
    own = types.Tuple((blocks, blocks, place[:, ::1]))
    packed = types.Tuple((codes, halves, halves, codes, halves, halves, place[:, ::1], lines))
    sizes = types.UniTuple(whole, 3)
    held = types.Tuple((own, packed, sizes))
    signs = types.uint64[:, :, ::1]
    works: list[Callable[[], Any]] = [fetch_exact]
    loops: list[tuple[Any, tuple[Any, ...]]] = [
        (search, (blocks, lines, signs, lines, whole, whole)),
        (add, (blocks, lines, lines, signs, lines, whole)),
        (fill, (blocks, lines, whole[::1], held, held, blocks, *(whole,) * 5)),
    ]
    if everything:
        each = byte[:, ::1], types.uint16[:, ::1], types.uint16[:, ::1], whole[::1], whole, lines
        works += [fetch_packed]
        loops += [
            (put, (line, codes, halves, halves, whole, whole, whole)),
            (restore, each),
            (products_of, (lines, held, whole, whole[::1], lines, place[::1])),
        ]
    compiling: list[Callable[[], Any]] = [partial(loop.compile, given) for loop, given in loops]
    for compiled in compiling + works:
        if not wanted():
            return
        compiled()
