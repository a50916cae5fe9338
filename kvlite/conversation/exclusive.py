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
    """As `alone`, for a generator: it is at work only while it makes its next piece. Until it has
    made its last one, or is closed, as an abandoned one is, another generator is refused, which
    would end it. The object's `answering` says so."""

    @wraps(work)
    def guarded(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        require_callbacks(options.get("callbacks", NO_CALLBACKS))
        with held(self.busy):
            if self.answering:
                raise SettingError(
                    "an answer is still coming in this conversation: take all of its pieces, or "
                    "close it, before another one"
                )
            pieces = work(self, *args, **options)
            self.answering = True
        try:
            while True:
                with held(self.busy):
                    try:
                        piece = next(pieces)
                    except StopIteration:
                        return
                if piece.metrics.finish_reason is not None:
                    self.answering = False
                yield piece
        finally:
            pieces.close()
            self.answering = False

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
