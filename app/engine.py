"""One thread that all of torch's work is done in, in the order in which it is asked for.

Devices, streams and inference mode belong to threads, and a web framework answers from many.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from .work import Work


class Engine:
    """The thread, and what waits for it.

    Attributes:
        current: what is being done, None while nothing is.
    """

    def __init__(self) -> None:
        self.current: Work | None = None
        self._lock = threading.Lock()
        self._waiting: list[Work] = []
        self._closed = False
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvlite engine", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[Work], Any], title: str) -> Work:
        """Have something done, after all that was asked for before; nothing once this is closed."""
        work = Work(task, title)
        with self._lock:
            if not self._closed:
                self._wait(work)
                return work
        work.cancel.set()
        work.do()
        return work

    def close(
        self, last: Callable[[Work], Any] | None = None, seconds: float | None = None
    ) -> None:
        """End what is being done, do nothing more that waits, and end the thread.

        Args:
            last: done all the same, after everything else.
            seconds: to wait for it at most.
        """
        with self._lock:
            for work in [*self._waiting, *([self.current] if self.current else [])]:
                work.cancel.set()
            if last is not None and not self._closed:
                self._wait(Work(last, ""))
            self._closed = True
            self._queue.put(None)
        self._thread.join(seconds)

    def _wait(self, work: Work) -> None:
        self._waiting.append(work)
        self._count()
        self._queue.put(work)

    def _count(self) -> None:
        """Tell each that waits how many go first."""
        busy = self.current is not None
        for number, work in enumerate(self._waiting):
            work.show(before=number + busy)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            with self._lock:
                self._waiting.remove(work)
                self.current = work
                work.begin(work.shown.title)
                work.show(before=0)
                self._count()
            work.do()
            with self._lock:
                self.current = None
                self._count()
