"""Recall's loops for a CPU, compiled while a prompt is read."""

import threading
from contextlib import suppress
from functools import cache

import torch

from kvlite.cache.quantized import has_compiled


@cache
def begin_compiling(device: torch.device) -> threading.Thread | None:
    """Compile what recall needs on a device, once, in a thread of its own; None where it needs
    nothing. What is not ready yet when it is used waits for its turn with numba's compiler.

    The thread outlives the program's end by one loop at most: it is not killed within a compiler.
    """
    if not has_compiled(device):
        return None
    thread = threading.Thread(target=_compile, name="kvlite-compiling")
    thread.start()
    return thread


def _compile() -> None:
    # What fails here fails again where it is used, and is told there.
    with suppress(Exception):
        from kvlite.ops import numba_recall as compiled

        compiled.compile_all(threading.main_thread().is_alive)
