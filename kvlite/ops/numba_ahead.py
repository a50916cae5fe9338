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
    loops: list[Callable[[], Any]] = [
        partial(search.compile, (blocks, lines, signs, lines, whole, whole)),
        partial(add.compile, (blocks, lines, lines, signs, lines, whole)),
        fetch_exact,
    ]
    if everything:
        each = byte[:, ::1], types.uint16[:, ::1], types.uint16[:, ::1], whole[::1], whole, lines
        loops += [
            partial(put.compile, (line, codes, halves, halves, whole, whole, whole)),
            partial(restore.compile, each),
            partial(products_of.compile, (lines, held, whole, whole[::1], lines, place[::1])),
            partial(
                fill.compile,
                (blocks, lines, whole[::1], held, held, blocks, *(whole,) * 5),
            ),
            fetch_packed,
        ]
    for compiled in loops:
        if not wanted():
            return
        compiled()
