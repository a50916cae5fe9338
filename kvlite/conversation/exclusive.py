"""One call at a time on a conversation: a second one is refused, and nothing is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, cast

from kvlite.engine.callbacks import NO_CALLBACKS, require_callbacks
from kvlite.errors import SettingError

Method = TypeVar("Method", bound=Callable[..., Any])


def alone(work: Method) -> Method:
    """Let a method raise SettingError while another one is at work, in another thread or further
    up this one; or if its `callbacks` are not `Callbacks`. The object has a lock, `busy`."""

    @wraps(work)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        require_callbacks(options.get("callbacks", NO_CALLBACKS))
        with held(self.busy):
            return work(self, *args, **options)

    return cast(Method, guarded)


def alone_by_steps(work: Method) -> Method:
    """As `alone`, for a generator: it is at work only while it makes its next piece, so that an
    abandoned one is in nobody's way."""

    @wraps(work)
    def guarded(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        require_callbacks(options.get("callbacks", NO_CALLBACKS))
        with held(self.busy):
            pieces = work(self, *args, **options)
        try:
            while True:
                with held(self.busy):
                    try:
                        piece = next(pieces)
                    except StopIteration:
                        return
                yield piece
        finally:
            pieces.close()

    return cast(Method, guarded)


@contextmanager
def held(busy: Lock) -> Iterator[None]:
    """Be at work in this block; raises SettingError while another call is."""
    if not busy.acquire(blocking=False):
        raise SettingError(
            "this conversation is busy: wait until it is done, or open another one for each thread"
        )
    try:
        yield
    finally:
        busy.release()
