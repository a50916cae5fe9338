"""A piece of work for the engine, and what the page shows of it meanwhile."""

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from threading import Condition, Event
from typing import Any

from kvlite.conversation.metrics import GenerationMetrics, Piece
from kvlite.engine.callbacks import Callbacks, ReadingBytes
from kvlite.errors import KvliteError, Stopped

_LOG = logging.getLogger(__name__)
# Seconds between two looks: nobody could see more of them.
PAUSE = 0.08
# Seconds after which work is shown again though nothing changed: a clock goes on.
BEAT = 1.0
# Seconds for which the figures of an answer stay.
LIVE = 0.5


@dataclass(frozen=True)
class WorkRequest:
    """What someone asked of a conversation, shown before it is done.

    Attributes:
        text: the message; "" where an earlier one is answered, or none is.
        above: how many of the conversation's messages stay; None for all.
        files: paths of the message's files, until they are read.
        documents: names of all its files.
        branch: the one to switch to, counted from 1.
        check: whether the last answer is checked.
        ahead: paths of files that are read for a message to come; None for other work.
    """

    text: str = ""
    above: int | None = None
    files: list[str] = field(default_factory=list)
    documents: tuple[str, ...] = ()
    branch: int | None = None
    check: bool = False
    ahead: tuple[str, ...] | None = None

    @property
    def answered(self) -> bool:
        """Whether it adds an answer to the conversation."""
        return bool(self.text) or self.above is not None


NOTHING = WorkRequest()


@dataclass(frozen=True)
class Shown:
    """How far work has gone.

    Attributes:
        before: how many pieces of work go first; 0 once it is being done.
        behind: the name of the one that is being done, if everybody may know it.
        title: what is being done.
        done, total: how much of that; 0 of 0 where it is not known.
        since: when that began, or the first of it was done, by `time.monotonic`.
        first: how much was done by then: what is slow at first says little of the rest.
        reading: what a reading holds that is under way.
        notes: sentences for the user.
        text: the answer so far.
        reasoning, reasoning_tokens: what was thought before it.
        error: a sentence, if it failed.
    """

    before: int = 0
    behind: str = ""
    title: str = ""
    done: int = 0
    total: int = 0
    since: float = 0.0
    first: int = 0
    reading: ReadingBytes | None = None
    notes: tuple[str, ...] = ()
    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    metrics: GenerationMetrics | None = None
    ended: bool = False
    error: str = ""

    def seconds_left(self, now: float) -> float | None:
        """An estimate from the speed so far; None where there is none yet."""
        passed = now - self.since
        if not self.first < self.done < self.total or passed < 1:
            return None
        return passed * (self.total - self.done) / (self.done - self.first)


class Work:
    """One piece of work, done by the engine's thread and followed from others.

    Attributes:
        request: what was asked of a conversation.
        public: its name where everybody may know what is being done.
        shown: how far it has gone; replaced whole, so that any thread may look.
        cancel: set to end it where nothing is lost.
        abandoned: whether nobody waits for it any more.
        ended: set once it has ended.
        result: what it made, once it has ended well.
        failure: what went wrong, without its traceback.
        on_show: called by the thread that does it, each time it shows something.
        planned: as of `Callbacks`.
    """

    def __init__(
        self,
        task: "Task",
        title: str,
        public: str = "",
        failed: "Callable[[Work], None] | None" = None,
        request: WorkRequest = NOTHING,
    ) -> None:
        """Work that is called `title` until the task says more. If it goes wrong, `failed` is
        called before those who follow it know."""
        self.request = request
        self.public = public
        self.abandoned = False
        self.ended = Event()
        self.cancel = Event()
        self.result: Any = None
        self.failure: Exception | None = None
        self.shown = Shown(title=title, since=time.monotonic())
        self.on_show: Callable[[Shown], None] | None = None
        self.planned: Callable[[int], None] | None = None
        self._measured = 0.0
        self._failed = failed
        self._task: Task | None = task
        self._changed = Condition()

    @property
    def callbacks(self) -> Callbacks:
        """Callbacks that show how far prefill and decoding are."""
        return Callbacks(self.progress, self.note, self.cancel, self._reading, self.planned)

    def show(self, **values: Any) -> None:
        """Change what is shown."""
        with self._changed:
            self.shown = replace(self.shown, **values)
            self._changed.notify_all()
        if self.on_show is not None:
            self.on_show(self.shown)

    def begin(self, title: str) -> None:
        """Show that its next part begins."""
        self.show(title=title, done=0, total=0, since=time.monotonic(), first=0, reading=None)

    def progress(self, done: int, total: int) -> None:
        """Show how much of that part is done."""
        now = self.shown
        if not now.done or total != now.total:
            self.show(done=done, total=total, since=time.monotonic(), first=done)
        else:
            self.show(done=done, total=total)

    def _reading(self, held: ReadingBytes) -> None:
        self.show(reading=held)

    def note(self, sentence: str) -> None:
        """Tell the user something, once."""
        if sentence not in self.shown.notes:
            self.show(notes=(*self.shown.notes, sentence))

    def hear(self, piece: Piece) -> None:
        """Show one more piece of the answer."""
        self.show(
            title="",
            reading=None,
            text=self.shown.text + piece.text,
            reasoning=self.shown.reasoning + piece.reasoning,
            reasoning_tokens=piece.reasoning_tokens,
            metrics=self._metrics(piece),
        )

    def _metrics(self, piece: Piece) -> GenerationMetrics | None:
        """Those to show: nobody could read them if they changed with every token."""
        now = time.monotonic()
        if piece.finish_reason is None and now - self._measured < LIVE:
            return self.shown.metrics
        self._measured = now
        return piece.metrics

    def prepare(self, first: "Task") -> bool:
        """Do something before it; whether that went well. If not, the work has ended."""
        title, done = self.shown.title, self.go_on(first)
        if done:
            self.begin(title)
        return done

    def go_on(self, part: "Task") -> bool:
        """Do a part of it; whether that went well. If not, the work has ended."""
        if self._went_well(part):
            return True
        self._task = None
        self._end()
        return False

    def do(self) -> None:
        """Do it, once. Afterwards it keeps nothing alive that the task held."""
        task, self._task = self._task, None
        self._went_well(task)
        del task  # before anyone learns that it has ended
        self._end()

    def abandon(self) -> None:
        """Cancel it, as nobody waits for it any more."""
        self.abandoned = True
        self.cancel.set()

    def _end(self) -> None:
        if self.failure is not None and self._failed is not None:
            self._failed(self)
        self._failed = None
        self.show(ended=True)
        self.ended.set()

    def _went_well(self, task: "Task | None") -> bool:
        try:
            if self.cancel.is_set() or task is None:
                raise Stopped
            self.result = task(self)
        except Exception as error:
            known = isinstance(error, KvliteError | OSError)
            if not known:
                # As text: a log that keeps the error would keep the model.
                _LOG.error("kvlite went wrong\n%s", traceback.format_exc())
            self.failure = without_traceback(error)
            self.show(error=str(error) if known else f"{type(error).__name__}: {error}")
            return False
        return True

    def follow(self, pause: float = PAUSE) -> Iterator[Shown]:
        """What it shows until it has ended: at most once per `pause` seconds, and at least once a
        second. Work goes on if nobody follows it."""
        seen = None
        while seen is None or not seen.ended:
            with self._changed:
                if self.shown is seen:
                    self._changed.wait(BEAT)
                seen = self.shown
            yield seen
            time.sleep(0 if seen.ended else pause)

    def nudge(self) -> None:
        """Wake all who follow it."""
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> Any:
        """Its result, or raises what went wrong."""
        for _ in self.follow():
            pass
        if self.failure is not None:
            raise self.failure
        return self.result


Task = Callable[[Work], Any]
"""A function that does work, and shows how far it is."""


def without_traceback(error: Exception) -> Exception:
    """The error without the frames that hold what was there: a model, a cache."""
    chain: list[BaseException | None] = [error]
    for each in chain:
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            chain += [each.__cause__, each.__context__]
    return error
