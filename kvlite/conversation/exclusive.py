"""One call at a time on a conversation: a second one is refused, and nothing is lost.

An object of such a class has a lock, `busy`, and `answering`: whether an answer is still going on.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from kvlite.engine.callbacks import NO_CALLBACKS, require_callbacks
from kvlite.errors import SettingError

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


def alone(work: Method) -> Method:
    """Let a method raise SettingError while another one is at work, in another thread or further
    up this one, or an answer is going on; or if its `callbacks` are not `Callbacks`."""

    @wraps(work)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        require_callbacks(options.get("callbacks", NO_CALLBACKS))
        with at_work(self):
            return work(self, *args, **options)

    return cast(Method, guarded)


def alone_by_steps(work: Method) -> Method:
    """As `alone`, for a generator of an answer, which goes on until it ends or is closed."""

    @wraps(work)
    def guarded(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        require_callbacks(options.get("callbacks", NO_CALLBACKS))
        with at_work(self):
            pieces = work(self, *args, **options)
            self.answering = True
        try:
            yield from by_steps(self, pieces)
        finally:
            self.answering = False

    return cast(Method, guarded)


def by_steps(talk: Any, pieces: Generator[T, None, None]) -> Iterator[T]:
    """A generator's pieces; `talk` is at work while one is made. It is closed at the end."""
    try:
        while True:
            with at_step(talk):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
    finally:
        pieces.close()


@contextmanager
def at_work(talk: Any) -> Iterator[None]:
    """Be at work in this block; raises SettingError while another call is, or an answer goes on."""
    with at_step(talk):
        if talk.answering:
            raise SettingError(
                "an answer is still going on here: hear it to its end, or close() its stream"
            )
        yield


@contextmanager
def at_step(talk: Any) -> Iterator[None]:
    """As `at_work`, for what may also be done between two pieces of an answer."""
    if not talk.busy.acquire(blocking=False):
        raise SettingError(
            "this conversation is busy: wait until it is done, or open another one for each thread"
        )
    try:
        yield
    finally:
        talk.busy.release()
