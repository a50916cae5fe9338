"""One thread that does all of torch's work, in the order in which it was asked for.

Devices, streams and inference mode belong to threads, and a web framework answers from many.
"""

import queue
import threading
from collections.abc import Callable

from kvlite.web.work import NOTHING, Task, Work, WorkRequest


class Engine:
    """The thread, what it does now (`current`), and what waits for it."""

    def __init__(self) -> None:
        self.current: Work | None = None
        self._lock = threading.Lock()
        self._waiting: list[Work] = []
        self._preparing: set[Work] = set()
        self._closed = False
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvlite engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        task: Task,
        title: str,
        first: Task | None = None,
        public: str = "",
        failed: Callable[[Work], None] | None = None,
        request: WorkRequest = NOTHING,
        *,
        beside: bool = False,
    ) -> Work:
        """Have something done after all that was asked for before; nothing is, once this is closed.
        What needs no device is done `first`, in a thread of its own, before the work waits its
        turn; with `beside` all of it is. Other arguments are those of `Work`."""
        work = Work(task, title, public, failed, request)
        if first is None and not beside:
            self._enqueue(work)
        else:
            with self._lock:
                self._preparing.add(work)
                if self._closed:
                    work.cancel.set()
            threading.Thread(
                target=self._prepare, args=(work, first, beside), name="kvlite first", daemon=True
            ).start()
        return work

    def _prepare(self, work: Work, first: Task | None, beside: bool) -> None:
        whole = first is None or work.prepare(first)
        if whole and beside:
            work.do()
        with self._lock:
            self._preparing.remove(work)
        if whole and not beside:
            self._enqueue(work)

    def _enqueue(self, work: Work) -> None:
        with self._lock:
            if not self._closed:
                self._wait(work)
                return
        work.cancel.set()
        work.do()

    @property
    def is_wanted(self) -> bool:
        """Whether something waits for what is being done now to end."""
        return bool(self._waiting)

    def close(
        self,
        last: Task | None = None,
        patience: float | None = None,
        seconds: float | None = None,
    ) -> bool:
        """Cancel all work except the `last`, which is done after everything else, and end the
        thread; whether it has ended. Each work being done gets `patience` seconds, the rest
        `seconds`."""
        with self._lock:
            now = [*self._preparing, *([self.current] if self.current else [])]
            for work in [*self._waiting, *now]:
                work.cancel.set()
            if last is not None and not self._closed:
                self._wait(Work(last, ""))
            self._closed = True
            self._queue.put(None)
        ended = [work.ended.wait(patience) for work in now]
        if self.current in now and not all(ended):
            return False
        self._thread.join(seconds)
        return all(ended) and not self._thread.is_alive()

    def _wait(self, work: Work) -> None:
        self._waiting.append(work)
        self._count()
        self._queue.put(work)

    def _count(self) -> None:
        now = self.current
        for number, work in enumerate(self._waiting):
            behind = "" if now is None else now.public
            work.show(before=number + (now is not None), behind=behind)

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
