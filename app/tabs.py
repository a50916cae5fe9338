"""What each tab of a browser shows and follows: one thing at a time, so that none writes over
another."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

# Tabs that are remembered: of those that nobody closed properly.
_MOST = 10_000


class Tabs:
    """The tabs that follow something; a tab is known by its session's hash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._following: dict[str, tuple[Event, Event]] = {}
        self._at: dict[str, str] = {}

    def go(self, tab: str, id: str) -> None:
        """A tab shows this conversation from now on, and leaves off what it follows."""
        with self._lock:
            self._at.pop(tab, None)
            self._remember(tab, id)
        self.leave(tab)

    def arrive(self, tab: str, id: str) -> bool:
        """A tab shows this conversation from now on, unless it shows one already; whether it
        does."""
        with self._lock:
            if tab in self._at:
                return False
            self._remember(tab, id)
            return True

    def _remember(self, tab: str, id: str) -> None:
        self._at[tab] = id
        if len(self._at) > _MOST:
            del self._at[next(iter(self._at))]

    def shows(self, tab: str, id: str) -> bool:
        """Whether a tab shows this conversation, as far as is known."""
        return self._at.get(tab, id) == id

    @contextmanager
    def following(self, tab: str, id: str = "") -> Iterator[Event]:
        """While a tab follows something, and nothing else: what is given is set once it is to
        leave off.

        Args:
            id: of the conversation this belongs to; if the tab shows another by now, it is to leave
                off at once.
        """
        self.leave(tab)
        left, gone = mine = Event(), Event()
        with self._lock:
            self._following[tab] = mine
            if not self.shows(tab, id):
                left.set()
        try:
            yield left
        finally:
            gone.set()
            with self._lock:
                if self._following.get(tab) is mine:
                    del self._following[tab]

    def leave(self, tab: str, seconds: float = 30.0) -> None:
        """Have a tab leave off what it follows, and wait until it has.

        Args:
            seconds: to wait at most.
        """
        with self._lock:
            left, gone = self._following.pop(tab, (Event(), None))
        left.set()
        if gone is not None:
            gone.wait(seconds)
