"""Requests that are answered together: one reads at a time, in slices, and between two of them all
others decode in the same steps. One that has little to read need not wait for one that has much.

A request may join, and leave, between any two tokens. Its answer is the one that it would get
alone, to rounding (`engine.step`).
"""

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property

from kvlite.conversation.steps_together import StepsTogether
from kvlite.conversation.turn import Turn
from kvlite.errors import KvliteError, OutOfMemory
from kvlite.web.engine_thread import Engine
from kvlite.web.work import Shown, Work


@dataclass(frozen=True)
class Pause:
    """Where an answer lets others go on: after a token, or between two slices of reading.

    Attributes:
        turn: that made the token, if the answer goes on from there.
        reads: whether it is reading.
    """

    turn: Turn | None = None
    reads: bool = False


READING = Pause(reads=True)
Answer = Callable[[Work], Generator[Pause]]
"""Begins an answer, which sends its own tokens."""

# Tokens up to which a prompt has little to read.
LITTLE = 1024
# Answers that come together, at most: beyond it a step takes as long as one more of them saves.
MOST = 16


@dataclass(eq=False)
class Request:
    """A request, which waits, or whose answer is coming.

    Attributes:
        may_begin: whether nothing that it needs is in use; asked when that may have changed.
        to_read: how many tokens it has to read.
        steps: its answer, once it has begun.
        pause: where it waits now.
    """

    work: Work
    answer: Answer
    may_begin: Callable[[], bool]
    to_read: Callable[[], int]
    steps: Generator[Pause] | None = None
    pause: Pause = READING

    @cached_property
    def is_little(self) -> bool:
        """Whether it has little to read, as of when it was first asked."""
        return self.to_read() <= LITTLE


class Answering:
    """All requests that wait or are answered. The engine's thread does the work.

    Attributes:
        shares: whether an answer may begin beside others.
        between: called between two tokens.
    """

    def __init__(
        self,
        engine: Engine,
        shares: Callable[[], bool],
        between: Callable[[], None],
    ) -> None:
        self.waiting: list[Request] = []
        self.going: list[Request] = []
        self.shares, self.between = shares, between
        self._steps = StepsTogether()
        self._engine, self._lock = engine, threading.Lock()
        self._before = 0  # work of others, while the engine has not come to this
        self._running = self._changed = False

    def submit(
        self, answer: Answer, may_begin: Callable[[], bool], to_read: Callable[[], int]
    ) -> Work:
        """Have a request answered; the work ends with it. Args are those of `Request`."""
        request = Request(Work(lambda work: None, "Reading"), answer, may_begin, to_read)
        with self._lock:
            self.waiting.append(request)
            begins, self._running, self._changed = not self._running, True, True
            self._count()
        if begins:
            self._queue()
        return request.work

    def _queue(self) -> None:
        """Have the engine come to this, after all that it was asked for before."""
        host = self._engine.submit(self._run, "Reading", failed=self._give_up)
        host.on_show = self._moved
        self._moved(host.shown)

    def _moved(self, host: Shown) -> None:
        if host.before != self._before:
            with self._lock:
                self._before = host.before
                self._count()

    def _count(self) -> None:
        for number, each in enumerate(self.waiting):
            each.work.show(before=self._before + len(self.going) + number)

    def _run(self, host: Work) -> None:
        """Answer until there is nobody left. Whoever else waits for the engine has it once the
        answers that are coming have come, and before others begin."""
        self._changed = True
        while True:
            if host.cancel.is_set():
                for each in (*self.waiting, *self.going):
                    each.work.cancel.set()
                self._changed = True
            if (request := self._next()) is not None:
                self._begin(request)
            self._steps.take(self._turns)
            with self._lock:
                more = self._running = bool(self.waiting or self.going)
            if not more:
                return
            if not self.going and self._engine.is_wanted:
                self._queue()
                return
            readers = self._readers
            for each in [*self.going]:
                if each in readers or not each.pause.reads or each.work.cancel.is_set():
                    self._go_on(each)
            self.between()

    @property
    def _turns(self) -> list[Turn]:
        """Turns that go on with a step."""
        return [each.pause.turn for each in self.going if each.pause.turn is not None]

    @property
    def _readers(self) -> list[Request]:
        """Those that read, in turns: the first, and another that has little to read. Others that
        read again wait for them."""
        reading = [each for each in self.going if each.pause.reads]
        return reading[:1] + [each for each in reading[1:] if each.is_little][:1]

    def _next(self) -> Request | None:
        """Take the first request that may begin now, or that nobody waits for any more."""
        cancelled = any(each.work.cancel.is_set() for each in self.waiting)
        readers = self._readers
        if not cancelled and self.going and not self._changed:
            return None
        room = len(self.going) < MOST and not self._engine.is_wanted
        room = room and (not self.going or self.shares())
        beside = len(readers) == 1 and not readers[0].is_little
        self._changed = bool(readers)
        for request in [*self.waiting]:
            may = room and (not readers or (beside and request.is_little)) and _may_begin(request)
            if request.work.cancel.is_set() or may:
                with self._lock:
                    self.waiting.remove(request)
                    self._changed = True
                return request
        return None

    def _begin(self, request: Request) -> None:
        request.work.show(before=0, done=0, total=0)
        request.steps, request.pause = request.answer(request.work), READING
        self.going.append(request)
        with self._lock:
            self._count()

    def _go_on(self, request: Request) -> None:
        """One more token of an answer, or a slice of reading, or its end."""
        assert request.steps is not None
        steps, more, short = request.steps, False, False

        def advance(work: Work) -> None:
            nonlocal more, short
            try:
                for request.pause in steps:
                    more = True
                    return
            except OutOfMemory:
                short = request.pause.turn is None and len(self.going) > 1
                if not short:
                    raise

        ended = not request.work.go_on(advance)
        if more and not ended:
            if not request.pause.reads:
                request.work.begin("Reading")
            return
        steps.close()
        request.steps, request.pause = None, READING
        self.going.remove(request)
        if short:  # it waits until one of the others ends
            with self._lock:
                self.waiting.insert(0, request)
                self._changed = False
                self._count()
            return
        self._changed = True
        if not ended:
            request.work.do()

    def _give_up(self, host: Work) -> None:
        """End all requests, as the engine has ended or something went wrong."""
        with self._lock:
            left, self.waiting, self.going = [*self.waiting, *self.going], [], []
            self._running = False
        for each in left:
            if each.steps is not None:
                each.steps.close()
            each.work.abandon()
            each.work.do()


def _may_begin(request: Request) -> bool:
    """Whether nothing that it needs is in use; what is wrong with it is said once it begins, and
    ends no other."""
    try:
        return request.may_begin()
    except KvliteError:
        return True
