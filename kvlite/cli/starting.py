"""What makes a short command shorter: most of its time goes into importing libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """While it is entered, nothing is looked for that only refers to itself.

    torch and transformers are thousands of modules, of which all stay; looking through them again
    and again takes a fifth of the time that importing them does.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
