"""What each tab of a browser shows and follows: one thing at a time in each place of it, so that
none writes over another."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

# Tabs that are remembered: of those that nobody closed properly.
_MOST = 10_000


@dataclass(frozen=True)
class _Following:
    """Something that is followed.

    Attributes:
        wake: has whoever follows look up.
        left: set once he is to leave off.
        gone: set once he has.
    """

    wake: Callable[[], None]
    left: Event = field(default_factory=Event)
    gone: Event = field(default_factory=Event)


class Tabs:
    """The tabs there are; a tab is known by its session's hash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._following: dict[tuple[str, str], _Following] = {}
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

    def shows(self, tab: str, id: str) -> bool:
        """Whether a tab shows this conversation, as far as is known."""
        return self._at.get(tab, id) == id

    @contextmanager
    def following(
        self, tab: str, id: str = "", place: str = "", wake: Callable[[], None] = lambda: None
    ) -> Iterator[Event]:
        """While a tab follows something, and nothing else in that place: what is given is set once
        it is to leave off.

        Args:
            id: of the conversation this belongs to; if the tab shows another by now, it is to leave
                off at once.
            place: where what is followed is shown.
            wake: called when it is to leave off.
        """
        mine, key = _Following(wake), (tab, place)
        with self._lock:
            former = self._following.get(key)
            self._following[key] = mine
            if not self.shows(tab, id):
                mine.left.set()
        _end([former] if former else [])
        try:
            yield mine.left
        finally:
            mine.gone.set()
            with self._lock:
                if self._following.get(key) is mine:
                    del self._following[key]

    def leave(self, tab: str, seconds: float = 30.0) -> None:
        """Have a tab leave off what it follows, and wait until it has.

        Args:
            seconds: to wait at most, for each.
        """
        with self._lock:
            former = [each for key, each in self._following.items() if key[0] == tab]
        _end(former, seconds)

    def _remember(self, tab: str, id: str) -> None:
        self._at[tab] = id
        if len(self._at) > _MOST:
            del self._at[next(iter(self._at))]


def _end(followed: list[_Following], seconds: float = 30.0) -> None:
    """Have these leave off, and wait until they have."""
    for each in followed:
        each.left.set()
        each.wake()
    for each in followed:
        each.gone.wait(seconds)
