"""Engines in processes of their own, all with one queue of documents; without torch, for which each
process would wait before its engine says that it begins.

This process hands documents out and gets answers back. A process that ends gives what it had not
answered back to the queue, and another begins in its place.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

from kvlite.config.child_process import BEAT, Child, Parent
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import KvliteError, ModelError, reason
from kvlite.jobs.answer import TRIES, BatchAnswer, lost
from kvlite.jobs.tasks import Task, beginning, by_document, shares_of

_LOOK = "the system's log may say why"


@dataclass(frozen=True)
class Place:
    """Where an engine is, what it is begun with, and the variables of its process."""

    name: str
    begins: tuple[Any, ...]
    environment: Mapping[str, str]


def answered_by_workers(
    begin: Callable[..., Any],
    places: Sequence[Place],
    tasks: Sequence[Task],
    callbacks: Callbacks,
) -> Iterator[BatchAnswer]:
    """Answer tasks in several places; answers come as they end. `begin` makes an engine, as
    `run.Engine` does, and is at the top level of a module. If `callbacks` is cancelled it ends
    at once; answers that have begun are lost. Raises KvliteError if an engine could not begin."""
    queue, heard = _Queue(tasks), SimpleQueue[tuple[_Worker, str, Any]]()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_Worker(begin, place, heard))
            for place in places[: len(queue.fresh)]
        ]
        while queue.waiting or any(worker.going for worker in workers):
            for worker in workers:
                worker.work_on(queue)
            if callbacks.cancelled:
                return
            try:
                worker, kind, value = heard.get(timeout=BEAT)
            except Empty:
                continue
            if kind == "answer":
                del worker.going[value.id]
                yield value
            elif kind == "gone":
                yield from queue.take_back(worker.ended(value))
            else:
                worker.hear(kind, value, queue, callbacks)


class _Queue:
    """Documents that nobody reads yet.

    Attributes:
        fresh: those that nobody tried.
        again: those that were being read when a process ended. One of them may be why, so they are
            tried alone, when there are no others.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.fresh, self.again = deque(shares_of(tasks)), deque[list[Task]]()
        self._ends = Counter[Hashable]()

    @property
    def waiting(self) -> bool:
        return bool(self.fresh or self.again)

    def take_back(self, tasks: Sequence[Task]) -> Iterator[BatchAnswer]:
        """Take what a process that ended did not answer; what has ended too many has an error."""
        for share in by_document(tasks):
            self._ends[beginning(share[0])] += 1
            if self._ends[beginning(share[0])] < TRIES:
                self.again.append(share)
            else:
                yield from (lost(task, _LOOK) for task in share)


class _Worker:
    """The process of a place, as a context that ends it; `going` are tasks that it has not
    answered."""

    def __init__(
        self,
        begin: Callable[..., Any],
        place: Place,
        heard: "SimpleQueue[tuple[_Worker, str, Any]]",
    ) -> None:
        self.going = dict[str, Task]()
        self._name = place.name
        self._begin = partial(
            Child,
            lambda *message: heard.put((self, *message)),
            _serve,
            begin,
            *place.begins,
            environment=place.environment,
        )
        self._child: Child | None = self._begin()
        self._ends, self._idle, self._alone = 0, False, False

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.end()

    def work_on(self, queue: _Queue) -> None:
        """Give a process that has nothing to do the next document; begin another if it has ended
        and is needed."""
        if not queue.waiting:
            return
        if self._child is None:
            self._child = self._begin()
        elif self._idle:
            self._idle = False
            self._give(queue)

    def hear(self, kind: str, value: Any, queue: _Queue, callbacks: Callbacks) -> None:
        if kind == "wants":
            self._give(queue)
        elif kind == "idle":
            self._ends, self._idle = 0, True
        elif kind == "note":
            callbacks.say(f"{self._name}: {value}")
        else:
            assert kind == "error"
            error = value if isinstance(value, KvliteError) else ModelError(reason(value))
            error.add_note(f"on {self._name}")
            raise error

    def ended(self, code: int) -> list[Task]:
        self._ends += 1
        if self._ends == TRIES:
            raise ModelError(
                f"the process on {self._name} ended {TRIES} times while it was loading the model "
                f"(exit code {code}): {_LOOK}; the same command goes on"
            )
        assert self._child is not None
        self._child.end()
        self._child, self._idle = None, False
        tasks, self.going = [*self.going.values()], {}
        return tasks

    def _give(self, queue: _Queue) -> None:
        """Send the next document to a process that has room for it, or None: nothing for now."""
        assert self._child is not None
        share = None
        if queue.fresh and not (self.going and self._alone):
            share, self._alone = queue.fresh.popleft(), False
        elif queue.again and not self.going:
            share, self._alone = queue.again.popleft(), True
        self.going.update((task.id, task) for task in share or ())
        self._child.send(share)


def _serve(parent: Parent, begin: Callable[..., Any], *args: Any) -> None:
    engine = begin(*args)
    for why in engine.changes:
        parent.say("note", f"plan: {why}")
    callbacks = Callbacks(notify=partial(parent.say, "note"))

    def more() -> Any:
        parent.say("wants")
        return parent.get()

    while True:
        parent.say("idle")
        for answer in engine.answered(chain([parent.get()], iter(more, None)), callbacks):
            parent.say("answer", answer)
