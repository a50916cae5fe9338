"""A piece of work for the engine, and what whoever waits for it is shown meanwhile."""

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from threading import Condition, Event
from typing import Any

from kvlite.conversation.metrics import GenerationMetrics, Piece
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import KvliteError, Stopped

_LOG = logging.getLogger(__name__)
# Seconds between two looks: more of them would not be seen.
PAUSE = 0.08
# Seconds after which a look is due even where nothing changed: a clock goes on.
BEAT = 1.0


@dataclass(frozen=True)
class Shown:
    """How far work has gone.

    Attributes:
        before: pieces of work that go first; 0 once it is being done.
        behind: what the one that is being done is called, where all may know.
        title: what is being done.
        done, total: how much of it; 0 of 0 where that is not known.
        since: when that began, by `time.monotonic`.
        notes: sentences the user should know.
        text: of the answer so far.
        metrics: its account so far.
        ended: whether that was all.
        error: a sentence, if it failed.
    """

    before: int = 0
    behind: str = ""
    title: str = ""
    done: int = 0
    total: int = 0
    since: float = 0.0
    notes: tuple[str, ...] = ()
    text: str = ""
    metrics: GenerationMetrics | None = None
    ended: bool = False
    error: str = ""

    def seconds_left(self, now: float) -> float | None:
        """As it went so far; None where that cannot be told yet."""
        passed = now - self.since
        if not 0 < self.done < self.total or passed < 1:
            return None
        return passed * (self.total - self.done) / self.done


class Work:
    """One piece: done by the engine's thread, followed from others.

    Attributes:
        shown: how far it has gone; replaced whole, so that any thread may look.
        cancel: set to end it where nothing is lost.
        result: what it made, once it has ended well.
        failure: what went wrong, without the frames it came through.
        heed: called by whoever does it, each time it shows something.
        public: what it is called where all may know that.
        abandoned: whether nobody wants anything of it any more.
        ended: set once it has ended.
    """

    def __init__(
        self,
        task: "Task",
        title: str,
        public: str = "",
        failed: "Callable[[Work], None] | None" = None,
    ) -> None:
        """Work to be done.

        Args:
            task: is given this, to say how far it is.
            title: what to call it until it says more.
            failed: told if it went wrong, before those who follow it.
        """
        self.public = public
        self.abandoned = False
        self.ended = Event()
        self._failed = failed
        self._task: Task | None = task
        self.cancel = Event()
        self.result: Any = None
        self.failure: Exception | None = None
        self.shown = Shown(title=title, since=time.monotonic())
        self.heed: Callable[[], None] | None = None
        self._changed = Condition()

    @property
    def callbacks(self) -> Callbacks:
        """What follows a reading or an answer that is done for it."""
        return Callbacks(self.progress, self.note, self.cancel)

    def show(self, **values: Any) -> None:
        """Show something else of it."""
        with self._changed:
            self.shown = replace(self.shown, **values)
            self._changed.notify_all()
        if self.heed is not None:
            self.heed()

    def begin(self, title: str) -> None:
        """Another part of it begins."""
        self.show(title=title, done=0, total=0, since=time.monotonic())

    def progress(self, done: int, total: int) -> None:
        """So much of that part is done."""
        self.show(done=done, total=total)

    def note(self, sentence: str) -> None:
        """Something the user should know."""
        if sentence not in self.shown.notes:
            self.show(notes=(*self.shown.notes, sentence))

    def hear(self, piece: Piece) -> None:
        """A piece of the answer came."""
        self.show(title="", text=self.shown.text + piece.text, metrics=piece.metrics)

    def prepare(self, first: "Task") -> bool:
        """Do something before it; whether that went well. If not, that was all."""
        title = self.shown.title
        if self._went_well(first):
            self.begin(title)
            return True
        self._task = None
        self._end()
        return False

    def do(self) -> None:
        """Do it, once. It keeps nothing alive that it was done with."""
        task, self._task = self._task, None
        self._went_well(task)
        del task  # and with it what it holds, before anyone hears that it has ended
        self._end()

    def abandon(self) -> None:
        """End it, as nobody wants anything of it any more."""
        self.abandoned = True
        self.cancel.set()

    def _end(self) -> None:
        if self.failure is not None and self._failed is not None:
            self._failed(self)
        self._failed = None
        self.show(ended=True)
        self.ended.set()

    def _went_well(self, task: "Task | None") -> bool:
        """Whether a task did; what went wrong is kept for those who follow."""
        try:
            if self.cancel.is_set() or task is None:
                raise Stopped
            self.result = task(self)
        except Exception as error:
            known = isinstance(error, KvliteError | OSError)
            if not known:
                # As text: whoever keeps what is logged keeps no model with it.
                _LOG.error("kvlite went wrong\n%s", traceback.format_exc())
            self.failure = _without_frames(error)
            self.show(error=str(error) if known else f"{type(error).__name__}: {error}")
            return False
        return True

    def follow(self, pause: float = PAUSE) -> Iterator[Shown]:
        """What there is to see until it has ended. Whoever stops looking does not stop the work.

        Args:
            pause: seconds between two looks at least.
        """
        seen = None
        while seen is None or not seen.ended:
            seen = self._other(seen)
            yield seen
            time.sleep(0 if seen.ended else pause)

    def _other(self, seen: Shown | None) -> Shown:
        """What it shows once that is not what was seen, a beat has passed, or someone nudges."""
        with self._changed:
            if self.shown is seen:
                self._changed.wait(BEAT)
            return self.shown

    def nudge(self) -> None:
        """Have all who follow it look up."""
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> Any:
        """What it made.

        Raises:
            Exception: what went wrong.
        """
        for _ in self.follow():
            pass
        if self.failure is not None:
            raise self.failure
        return self.result


Task = Callable[[Work], Any]
"""What is given a piece of work, to say how far it is."""


def _without_frames(error: Exception) -> Exception:
    """The error, which does not hold what was there when it came: a model, a cache."""
    chain: list[BaseException | None] = [error]
    for each in chain:
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            chain += [each.__cause__, each.__context__]
    return error
