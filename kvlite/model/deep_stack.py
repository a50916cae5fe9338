"""Room for libraries that go down a level of the stack for each level of what they read.

llguidance ends the whole program if it runs out: a schema of a thousand references in a row is
enough for the stack that threads usually have.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")
# Four times what the deepest schema of `grammar.LONGEST` characters takes; only what is used of it
# is memory.
_BYTES = 256 << 20
_LOCK = threading.Lock()


def with_deep_stack(make: Callable[[], _T]) -> _T:
    """What `make` returns, or raises, in a thread of its own."""
    made = Future[_T]()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    with _LOCK:
        before = threading.stack_size(_BYTES)
        try:
            thread = threading.Thread(target=run, name="kvlite deep", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return made.result()
