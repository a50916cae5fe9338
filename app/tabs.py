"""What each tab of a browser follows: one thing at a time, so that none writes over another."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event


class Tabs:
    """The tabs that follow something; a tab is known by its session's hash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._following: dict[str, tuple[Event, Event]] = {}

    @contextmanager
    def following(self, tab: str) -> Iterator[Event]:
        """While a tab follows something, and nothing else: what is given is set once it is to
        leave off."""
        self.leave(tab)
        left, gone = mine = Event(), Event()
        with self._lock:
            self._following[tab] = mine
        try:
            yield left
        finally:
            gone.set()
            with self._lock:
                if self._following.get(tab) is mine:
                    del self._following[tab]

    def leave(self, tab: str, seconds: float = 3.0) -> None:
        """Have a tab leave off what it follows, and wait until it has.

        Args:
            seconds: to wait at most.
        """
        with self._lock:
            left, gone = self._following.pop(tab, (Event(), None))
        left.set()
        if gone is not None:
            gone.wait(seconds)
