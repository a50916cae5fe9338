"""Loops for a CPU are compiled in a thread while a model is loaded and a prompt is read, so that
no answer waits for a compiler in its middle."""

import threading
from contextlib import suppress
from functools import cache

import torch

from kvlite.ops.device import has_compiled
from kvlite.ops.loops import Loops


@cache
def begin_compiling(device: torch.device, *loops: Loops) -> threading.Thread | None:
    """Compile loops for a device, once, in a thread; None if it needs none. A loop that is used
    before it is ready waits for numba's compiler; a program that ends, for the pass that the
    compiler is at."""
    if not has_compiled(device):
        return None
    thread = threading.Thread(target=_compile, args=loops, name="kvlite-compiling")
    thread.start()
    return thread


def _compile(*loops: Loops) -> None:
    # What fails here fails again where it is used, and is reported there.
    with suppress(Exception):
        from kvlite.ops.compiled_loops import compile_all

        compile_all(loops, wanted=threading.main_thread().is_alive)
