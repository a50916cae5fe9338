"""One thing at a time with a conversation: what comes between is refused, and nothing is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import Any, Protocol, TypeVar, cast

from kvlite.engine.callbacks import NO_CALLBACKS, require_callbacks
from kvlite.errors import SettingError

Method = TypeVar("Method", bound=Callable[..., Any])


class Shared(Protocol):
    """What threads may share.

    Attributes:
        busy: held while something is done with it.
    """

    busy: Lock


def alone(work: Method) -> Method:
    """A method of something shared that raises SettingError while another one is at work: in
    another thread, or as what called this one; or if its `callbacks` are none."""

    @wraps(work)
    def guarded(self: Shared, *args: Any, **options: Any) -> Any:
        require_callbacks(options.get("callbacks", NO_CALLBACKS))
        with _held(self.busy):
            return work(self, *args, **options)

    return cast(Method, guarded)


def alone_by_steps(work: Method) -> Method:
    """As `alone`, of a generator: from one piece to the next, so that one nobody listens to any
    more is in nobody's way."""

    @wraps(work)
    def guarded(self: Shared, *args: Any, **options: Any) -> Iterator[Any]:
        require_callbacks(options.get("callbacks", NO_CALLBACKS))
        with _held(self.busy):
            pieces = work(self, *args, **options)
        try:
            while True:
                with _held(self.busy):
                    try:
                        piece = next(pieces)
                    except StopIteration:
                        return
                yield piece
        finally:
            pieces.close()

    return cast(Method, guarded)


@contextmanager
def _held(busy: Lock) -> Iterator[None]:
    if not busy.acquire(blocking=False):
        raise SettingError(
            "this conversation is at work already: wait until that is done, or open another one "
            "for each thread"
        )
    try:
        yield
    finally:
        busy.release()
