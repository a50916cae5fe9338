"""Who asks, and what each browser tab shows and follows: one thing at a time in each place, so that
none overwrites another."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

import gradio as gr

# How many tabs are remembered: browsers do not say that they closed one.
_MOST = 10_000


@dataclass(frozen=True)
class _Following:
    """Something that is followed: `wake` wakes the follower, `left` is set to have it stop, `gone`
    once it has."""

    wake: Callable[[], None]
    left: Event = field(default_factory=Event)
    gone: Event = field(default_factory=Event)


class Tabs:
    """All tabs, by their session's hash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._following: dict[tuple[str, str], _Following] = {}
        self._at: dict[str, str] = {}

    def go(self, tab: str, id: str) -> None:
        """A tab shows this conversation from now on, and stops following."""
        with self._lock:
            self._at.pop(tab, None)
            self._remember(tab, id)
        self.leave(tab)

    def arrive(self, tab: str, id: str) -> bool:
        """A tab shows this conversation, unless it shows one already; whether it does."""
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
        """While a tab follows something, and nothing else in that place: an event that is set when
        it is to stop, at once if the tab shows another conversation by now. Then `wake` is
        called."""
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
        """Have a tab stop following, and wait at most so long for each until it has."""
        with self._lock:
            former = [each for key, each in self._following.items() if key[0] == tab]
        _end(former, seconds)

    def _remember(self, tab: str, id: str) -> None:
        self._at[tab] = id
        if len(self._at) > _MOST:
            del self._at[next(iter(self._at))]


def _end(followed: list[_Following], seconds: float = 30.0) -> None:
    for each in followed:
        each.left.set()
        each.wake()
    for each in followed:
        each.gone.wait(seconds)


def owner_of(request: gr.Request) -> str:
    """The user's name, "" where nobody has to log in."""
    return request.username or ""
