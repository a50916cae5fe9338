"""Compiling recall's CPU loops while a prompt is read."""

import threading
from contextlib import suppress
from functools import cache

import torch

from kvlite.cache.quantized import has_compiled


@cache
def begin_compiling(device: torch.device, *, everything: bool = True) -> threading.Thread | None:
    """Compile the loops that recall needs on a device, once, in a thread; None if it needs none.
    With `everything` also those for quantized entries, and for layers that hold much. A loop that
    is used before it is ready waits for numba's compiler; a program that ends, for the loop that is
    being compiled."""
    if not has_compiled(device):
        return None
    thread = threading.Thread(target=_compile, args=(everything,), name="kvlite-compiling")
    thread.start()
    return thread


def _compile(everything: bool) -> None:
    # What fails here fails again where it is used, and is reported there.
    with suppress(Exception):
        from kvlite.ops import numba_ahead as compiled

        compiled.compile_all(threading.main_thread().is_alive, everything)
