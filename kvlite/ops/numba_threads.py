"""Work of some microseconds on a CPU, shared by threads that look for it.

To wake a thread takes longer than a product of a small model does. So threads that help go on
looking for a little longer than the calls of a step lie apart, and then leave. Nobody waits for one
that has not come: who has work does all that the others have not begun, so that nothing is lost
where a core is busy with something else. numba's own `prange` takes 80 to 120 us a call where
OpenMP's threads sleep or there is none, here 0.1; a small model's step makes 150 of them.
"""

import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from kvlite.ops.numba_jit import Loop, jitted

Array = np.ndarray
# What makes a processor wait for a moment and lets the other thread of its core work, an LLVM
# intrinsic and its argument; and what lets another program have the core. None where there is none.
_X86, _ARM = ("llvm.x86.sse2.pause", None), ("llvm.aarch64.isb", 15)
PAUSES = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
_PAUSE = PAUSES.get(platform.machine())
_YIELD = ("sched_yield", None) if hasattr(os, "sched_yield") else None
# After how many looks one lets another program have its core, and how often one looks for work
# before it leaves: some 200 us on a core that has nothing else to do.
TURN, PATIENCE = (1 << 6, 1 << 13) if _PAUSE else (1, 1 << 9)
# A board's numbers: parts of the work that nobody has taken, the work, and what it is given; in
# another line of the processor's cache, parts that are not done, and that failed; in others,
# threads that help, and whether somebody's work is here.
OPEN, WORK, GIVEN, LEFT, FAILED, HELPERS, TAKEN = 16, 17, 18, 32, 33, 48, 64


@cache
def _board(process: int) -> tuple[Array, ThreadPoolExecutor]:
    """Of a process: one that was forked has none of the threads that helped the other."""
    threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kvlite-help")
    return np.zeros(80, np.int64), threads


# A board where nobody looks.
NOBODY = np.empty(0, np.int64)


def board(parts: int = 2) -> Array:
    """Where compiled code puts work of so many parts for other threads. As many as torch computes
    with look there, or are on their way; empty where that is one, or there is one part."""
    wanted = torch.get_num_threads() - 1
    if wanted < 1 or parts < 2:
        return NOBODY
    made, threads = _board(os.getpid())
    while made[HELPERS] < wanted:
        _add(made, HELPERS, 1)
        try:
            threads.submit(help_others, made)
        except RuntimeError:  # no more threads can be had: one that is there takes its turn, too
            break
    return made


def reading(kind: Any) -> Callable[..., Any]:
    """What reads in work, at the address that it is given, what `share` was given for it: a numba
    type's, in which numbers are as wide as there."""

    @intrinsic
    def given(context, address):
        def generate(context, builder, signature, arguments):
            place = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            return impl_ret_borrowed(context, builder, kind, builder.load(place))

        return kind(types.intp), generate

    return given  # type: ignore[no-any-return]


@intrinsic
def _address(context, given):
    def generate(context, builder, signature, arguments):
        place = cgutils.alloca_once_value(builder, arguments[0])
        return builder.ptrtoint(place, context.get_value_type(types.intp))

    return types.intp(given), generate


_PART = types.void(types.intp, types.intp)


def work(loop: Loop) -> Callable[[], int]:
    """What compiles work, of which `share` does one part after the other, and returns its address.
    It takes the address of what it is given, and the part, which can be done again."""
    compiled: Any = jitted(loop)

    @cache
    def address() -> int:
        made = compiled.get_compile_result(_PART)
        return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))

    return address


@jitted
def helpers(board):
    """How many threads help, or are on their way."""
    return _read(board, HELPERS) if board.size else 0


@jitted
def share(board, work, given, parts):
    """Do all parts of some work, which is given this: in this thread, and in those that help. If
    one fails, all are done again in this thread, and its error is raised here."""
    address, done = _address(given), False
    if parts > 1 and board.size and _swap(board, TAKEN, 1) == 0:
        board[WORK], board[GIVEN], board[FAILED] = work, address, 0
        _swap(board, LEFT, parts)
        _swap(board, OPEN, parts)
        _take(board)
        looks = 0
        while _read(board, LEFT) > 0:
            _rest(looks)
            looks += 1
        done = _read(board, FAILED) == 0
        _swap(board, TAKEN, 0)
    if not done:
        for part in range(parts):
            _do(work, address, part)


@jitted
def _take(board):
    part = _add(board, OPEN, -1)
    while part > 0:
        if _read(board, FAILED) == 0 and _fails(board[WORK], board[GIVEN], part - 1):
            _swap(board, FAILED, 1)
        _add(board, LEFT, -1)
        part = _add(board, OPEN, -1)


@jitted
def help_others(board):
    """Take parts of whatever work comes, and leave where none does."""
    looks = 0
    while looks < PATIENCE:
        if _read(board, OPEN) > 0:
            _take(board)
            looks = 0
        else:
            _rest(looks)
            looks += 1
    _add(board, HELPERS, -1)


def _on_word(name: str) -> Callable[..., Any]:
    # At once, whoever else does; gives what was there.

    @intrinsic
    def change(context, board, place, number):
        def generate(context, builder, signature, arguments):
            given = context.make_array(signature.args[0])(context, builder, arguments[0])
            word = builder.gep(given.data, [arguments[1]])
            if name == "load":
                return builder.load_atomic(word, "acquire", 8)
            return builder.atomic_rmw(name, word, arguments[2], "acq_rel")

        return types.int64(types.int64[::1], types.int64, types.int64), generate

    return change  # type: ignore[no-any-return]


_loading, _adding, _swap = map(_on_word, ("load", "add", "xchg"))


@jitted
def _read(board, place):
    return _loading(board, place, 0)


@jitted
def _add(board, place, number):
    return _adding(board, place, number)


def _calling(raises: bool) -> Callable[..., Any]:
    # Raises the error of the work, or tells whether there is one.

    @intrinsic
    def call(context, work, given, part):
        def generate(context, builder, signature, arguments):
            convention = context.call_conv
            kind = convention.get_function_type(_PART.return_type, _PART.args).as_pointer()
            function = builder.inttoptr(arguments[0], kind)
            status, _ = convention.call_function(
                builder, function, _PART.return_type, _PART.args, arguments[1:]
            )
            if raises:
                with cgutils.if_unlikely(builder, status.is_error):
                    convention.return_status_propagate(builder, status)
            return status.is_error

        return types.boolean(types.intp, types.intp, types.intp), generate

    return call  # type: ignore[no-any-return]


_do, _fails = _calling(True), _calling(False)


def _telling(function: tuple[str, int | None] | None, returned: ir.Type) -> Callable[..., Any]:
    """What calls a function of at most one number; nothing if there is no function."""

    @intrinsic
    def tell(context):
        def generate(context, builder, signature, arguments):
            if function is not None:
                name, number = function
                given = [] if number is None else [ir.Constant(ir.IntType(32), number)]
                kind = ir.FunctionType(returned, [each.type for each in given])
                builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
            return context.get_dummy_value()

        return types.void(), generate

    return tell  # type: ignore[no-any-return]


_pause, _give_way = _telling(_PAUSE, ir.VoidType()), _telling(_YIELD, ir.IntType(32))


@jitted
def _rest(looks):
    if looks % TURN == TURN - 1:
        _give_way()
    else:
        _pause()
