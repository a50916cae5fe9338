"""Work in threads of their own: what cannot be interrupted, or needs a deep stack."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")
# llguidance goes down a level of the stack for each level of what it reads, and ends the whole
# program if it runs out: a schema of a thousand references in a row is enough for the stack that
# threads usually have. This is four times what the deepest schema of `grammar.LONGEST` characters
# takes; only what is used of it is memory.
_BYTES = 256 << 20
_LOCK = threading.Lock()


def in_thread(work: Callable[[], _T], name: str) -> Future[_T]:
    """What `work` will return, or raise, in a thread of that name."""
    made = Future[_T]()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


def with_deep_stack(make: Callable[[], _T]) -> _T:
    """What `make` returns, or raises, in a thread with room for deep recursion."""
    with _LOCK:
        before = threading.stack_size(_BYTES)
        try:
            made = in_thread(make, "kvlite deep")
        finally:
            threading.stack_size(before)
    return made.result()
