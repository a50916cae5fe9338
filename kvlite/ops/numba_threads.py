"""Work of some microseconds on a CPU, shared by threads that look for it.

To wake a thread takes longer than a product of a small model does. So threads that help go on
looking for a little longer than the calls of a step lie apart, and then leave. Nobody waits for one
that has not come: who has work does all that the others have not begun, so that nothing is lost
where a core is busy with something else.
"""

import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from kvlite.ops.numba_vectors import Loop, jitted

Array = np.ndarray
# How often one looks for work before it leaves: some 200 us on a core that has nothing else to do.
PATIENCE = 1 << 13
# After how many looks it lets another program have its core.
TURN = 1 << 6
# A board's numbers: parts of the work that nobody has taken, the work, and what it is given; in
# another line of the processor's cache, parts that are not done, and that failed; in others,
# threads that help, and whether somebody's work is here.
OPEN, WORK, GIVEN, LEFT, FAILED, HELPERS, TAKEN = 16, 17, 18, 32, 33, 48, 64


@cache
def _board() -> tuple[Array, ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kvlite-help")
    return np.zeros(80, np.int64), threads


# A board where nobody looks.
NOBODY = np.empty(0, np.int64)


def board() -> Array:
    """Where compiled code puts work for other threads. As many as torch computes with look there,
    or are on their way; empty where that is one."""
    wanted = torch.get_num_threads() - 1
    if wanted < 1:
        return NOBODY
    made, threads = _board()
    while made[HELPERS] < wanted:
        _add(made, HELPERS, 1)
        try:
            threads.submit(_help, made)
        except RuntimeError:  # no more threads can be had: work is done without
            _add(made, HELPERS, -1)
            break
    return made


def passing(kind: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How work is given what it needs, of a numba type: what gives an address for it, and what
    reads it there. The caller holds it meanwhile."""

    @intrinsic
    def address(context, given):
        def generate(context, builder, signature, arguments):
            place = cgutils.alloca_once_value(builder, arguments[0])
            return builder.ptrtoint(place, context.get_value_type(types.intp))

        return types.intp(kind), generate

    @intrinsic
    def given(context, address):
        def generate(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            return impl_ret_borrowed(context, builder, kind, builder.load(place))

        return kind(types.intp), generate

    return address, given


def work(loop: Loop) -> Callable[[], int]:
    """What compiles work, of which `share` calls one part, and returns its address. It takes the
    address of what it is given, and the part; it returns 1."""

    @cache
    def compiled() -> Any:
        signature, options = types.intp(types.intp, types.intp), {"nopython": True}
        try:
            return numba.cfunc(signature, cache=True, **options)(loop)
        except RuntimeError:
            return numba.cfunc(signature, **options)(loop)

    return lambda: int(compiled().address)


@jitted
def helpers(board):
    """How many threads help, or are on their way."""
    return _read(board, HELPERS) if board.size else 0


@jitted
def share(board, work, given, parts):
    """Do all parts of some work, given an address: in this thread, and in those that help.

    Raises:
        MemoryError: if a part failed, as nothing else makes it fail.
    """
    failed = 0
    if board.size and _swap(board, TAKEN, 1) == 0:
        board[WORK], board[GIVEN], board[FAILED] = work, given, 0
        _write(board, LEFT, parts)
        _write(board, OPEN, parts)
        _take(board)
        looks = 0
        while _read(board, LEFT) > 0:
            _rest(looks)
            looks += 1
        failed = _read(board, FAILED)
        _write(board, TAKEN, 0)
    else:
        for part in range(parts):
            failed += 1 - _call(work, given, part)
    if failed:
        raise MemoryError("a part of a step's work")


@jitted
def _take(board):
    """Do parts of the work until all are taken."""
    part = _add(board, OPEN, -1)
    while part > 0:
        if _call(board[WORK], board[GIVEN], part - 1) == 0:
            _add(board, FAILED, 1)
        _add(board, LEFT, -1)
        part = _add(board, OPEN, -1)


@jitted
def _help(board):
    """Look for work, and do it."""
    looks = 0
    while looks < PATIENCE:
        if _read(board, OPEN) > 0:
            _take(board)
            looks = 0
        else:
            _rest(looks)
            looks += 1
    _add(board, HELPERS, -1)


def _on_word(name: str, numbers: int) -> Callable[..., Any]:
    """What reads or changes a number of a board at once, whoever else does; it gives what was
    there."""

    def generate(context, builder, signature, arguments):
        given = context.make_array(signature.args[0])(context, builder, arguments[0])
        word = builder.gep(given.data, [arguments[1]])
        if name == "load":
            return builder.load_atomic(word, "acquire", 8)
        if name == "store":
            builder.store_atomic(arguments[2], word, "release", 8)
            return arguments[2]
        return builder.atomic_rmw(name, word, arguments[2], "acq_rel")

    kinds = types.int64[::1], *(types.int64,) * (1 + numbers)
    if numbers:

        @intrinsic
        def change(context, board, place, number):
            return types.int64(*kinds), generate

        return change  # type: ignore[no-any-return]

    @intrinsic
    def read(context, board, place):
        return types.int64(*kinds), generate

    return read  # type: ignore[no-any-return]


_read, _write = _on_word("load", 0), _on_word("store", 1)
_adding, _swap = _on_word("add", 1), _on_word("xchg", 1)


@jitted
def _add(board, place, number):
    return _adding(board, place, number)


@intrinsic
def _call(context, work, given, part):
    """Call a function by its address."""

    def generate(context, builder, signature, arguments):
        number = context.get_value_type(types.intp)
        function = ir.FunctionType(number, [number, number]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], function), arguments[1:])

    return types.intp(types.intp, types.intp, types.intp), generate


# What lets the other thread of a core work, and what lets another program have it; None where a
# system has none.
_PAUSE = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else None
_YIELD = "sched_yield" if hasattr(os, "sched_yield") else None


def _calling(name: str | None, returned: ir.Type) -> Callable[..., Any]:
    """What calls a function without arguments."""

    @intrinsic
    def call(context):
        def generate(context, builder, signature, arguments):
            if name is not None:
                kind = ir.FunctionType(returned, [])
                builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
            return context.get_dummy_value()

        return types.void(), generate

    return call  # type: ignore[no-any-return]


_pause, _give_way = _calling(_PAUSE, ir.VoidType()), _calling(_YIELD, ir.IntType(32))


@jitted
def _rest(looks):
    """Do nothing for a moment, between two looks."""
    if looks % TURN == TURN - 1:
        _give_way()
    else:
        _pause()
