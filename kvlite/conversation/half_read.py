"""A reading that was left between two slices, and goes on if the same is read next."""

from threading import Event
from time import perf_counter
from typing import Any, cast

from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.turn import Turn
from kvlite.engine.callbacks import Callbacks, ReadingBytes
from kvlite.engine.slices import Slices


class HalfRead:
    """A turn that is being read, for one caller after another. Nobody may look at the cache between
    two of them.

    Attributes:
        turn: that reads.
        start: where it begins, if that can be gone back to.
        asked: what the turn was asked for with.
        slices: of the reading, which tells `callbacks`.
    """

    slices: Slices[None]

    def __init__(
        self, turn: Turn, start: Checkpoint | None, asked: Any, callbacks: Callbacks
    ) -> None:
        self.turn, self.start, self.asked = turn, start, asked
        self._follower = callbacks
        self._left: float | None = None
        self._begun = False
        self._wanted = self._held = 0

    @property
    def callbacks(self) -> Callbacks:
        """They pass on what they are told to whoever follows the reading."""
        told = self._progress, self._notify, cast(Event, self), self._reading
        return Callbacks(*told, None if self._follower.planned is None else self._planned)

    def go_on(self, callbacks: Callbacks, missed: float | None) -> bool:
        """Read another slice; False once all is read.

        Args:
            missed: seconds in which others followed it that did not want it.
        """
        self._follower = callbacks
        if self._left is not None:
            missed = perf_counter() - self._left
            if callbacks.planned is not None and self._wanted > self._held:
                callbacks.planned(self._wanted - self._held)
        self._left = None
        try:
            self.slices.send(missed)
        except StopIteration:
            return False
        self._begun = True
        return True

    def leave(self) -> None:
        """Let it wait for somebody who wants it."""
        self._follower, self._left = Callbacks(), perf_counter()

    def end(self) -> None:
        """Be as before, unless all was read; hold nothing any more."""
        self.slices.close()
        self.turn.say = self._follower.say  # not this, which holds the turn

    def is_set(self) -> bool:
        """Whether reading ends at once, and all that was read is lost: in the first slice, which
        may be the only one. After it, it can just be left."""
        return self._follower.cancelled and not self._begun

    def _progress(self, done: int, total: int) -> None:
        if self._follower.progress is not None:
            self._follower.progress(done, total)

    def _notify(self, note: str) -> None:
        self._follower.say(note)

    def _planned(self, nbytes: int) -> None:
        self._wanted = nbytes
        if self._follower.planned is not None:
            self._follower.planned(nbytes)

    def _reading(self, held: ReadingBytes) -> None:
        self._held = held.hidden + held.layer + held.kept
        if self._follower.reading is not None:
            self._follower.reading(held)
