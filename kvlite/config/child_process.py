"""Work in a child process, which can be stopped at once and has a memory limit.

The child is another Python that runs this module: unlike `multiprocessing` it never imports the
caller's own script. It ends with its parent, however that ends, and programs that it began end with
it: they are a process group.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

from kvlite.errors import KvliteError, require_uncancelled

T = TypeVar("T")

# The exit code of a process that the system killed.
_KILLED = -9
# And of one that took its seconds.
_OUT_OF_TIME = -24
# Seconds by the clock for each of a processor.
_WAIT = 10
# Answers go first.
_NICENESS = 15
# Seconds between checks for cancellation, and between reports of progress.
BEAT = 0.05


class ChildEnded(KvliteError):
    """A child process ended before its work was done."""


def run_in_child(
    work: Callable[..., T],
    /,
    *args: Any,
    progress: Callable[..., None] | None = None,
    cancel: threading.Event | None = None,
    memory: int | None = None,
    seconds: int | None = None,
    **kwargs: Any,
) -> T:
    """Call `work(*args, **kwargs)` in a child process and return its result.

    Args:
        work: a function at the top level of a module. It, its arguments, its result and its
            exceptions are pickled, so none should hold a model or a tensor.
        progress: if given, `work` gets a keyword `progress`, and its calls are repeated here; calls
            that follow another too fast to be seen are left out.
        cancel: set to end the child.
        memory: bytes the child may take beyond Python itself; no limit on Windows.
        seconds: of a processor that it may take; then somebody waits for it, and answers do not go
            first. On Windows, and where it sleeps, it may be ten times as many by the clock.

    Raises:
        Stopped: `cancel` was set.
        MemoryError: the child ran out of memory, or the system killed it.
        TimeoutError: it took its `seconds`.
        ChildEnded: it ended in another way.
        Exception: whatever `work` raised.
    """
    said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    given = work, args, kwargs, progress is not None, memory, seconds
    until = None if seconds is None else time.monotonic() + _WAIT * seconds
    with Child(lambda *message: said.put(message), _work, *given):
        while True:
            require_uncancelled(cancel)
            if until is not None and time.monotonic() > until:
                raise TimeoutError
            try:
                kind, value = said.get(timeout=BEAT)
            except queue.Empty:
                continue
            if kind == "progress":
                assert progress is not None
                progress(*value)
            elif kind == "result":
                result: T = value
                return result
            elif kind == "error":
                raise value
            else:
                raise _ended(value)


class Child:
    """Another Python at work, as a context that ends it.

    Args:
        hear: called, on a thread, with the kind and the value of each message: those of `work`,
            then "result" or "error", and whatever happens at last "gone", with the exit code.
        work: called with its `Parent`, then with `args`; all are pickled.
        environment: variables that differ there.
    """

    def __init__(
        self,
        hear: Callable[[str, Any], None],
        work: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            # -P: import nothing from the current folder
            [sys.executable, "-P", "-m", "kvlite.config.child_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, **environment},
            process_group=None if sys.platform == "win32" else 0,
        )
        self._hear = hear
        threading.Thread(target=self._listen, daemon=True).start()
        self.send((work, args))

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def send(self, value: Any) -> None:
        """Hand it something; nothing happens if it has ended, which `hear` is told."""
        assert self._process.stdin is not None
        with suppress(OSError):
            pickle.dump(value, self._process.stdin)
            self._process.stdin.flush()

    def end(self) -> None:
        """Kill it and what it began, if they have not ended."""
        _kill(self._process)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):  # unsent data is lost
                stream.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(Exception):  # a pickle that is cut short may break in many ways
            while True:
                self._hear(*pickle.load(self._process.stdout))
        self._hear("gone", self._process.wait())


class Parent:
    """The process that began a child, as the child sees it. When it ends, so does the child."""

    def __init__(self, sends: BinaryIO, hears: BinaryIO) -> None:
        self._sends, self._hears = sends, hears
        self._came: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def begin(self) -> Any:
        """What it sent first; from then on it is listened to."""
        first = pickle.load(self._hears)
        threading.Thread(target=self._receive, daemon=True).start()
        return first

    def say(self, kind: str, value: Any = None) -> None:
        """Send a message."""
        self._sends.write(pickle.dumps((kind, value)))
        self._sends.flush()

    def get(self) -> Any:
        """What it sent next; waits for it."""
        return self._came.get()

    def _receive(self) -> None:
        # Its end stays open until it calls `end`, or ends itself.
        with suppress(EOFError, OSError):
            while True:
                self._came.put(pickle.load(self._hears))
        if sys.platform != "win32" and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if sys.platform == "win32" or not hasattr(os, "killpg"):
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)


def _ended(code: int) -> Exception:
    if code == _KILLED:
        return MemoryError("a child process was killed, as for its memory")
    if code == _OUT_OF_TIME:
        return TimeoutError("a child process took its time")
    return ChildEnded(
        f"a process that kvlite began has ended by itself (exit code {code}): try again, and "
        "report it if that happens again"
    )


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
    parent = Parent(out, sys.stdin.buffer)
    try:
        work, args = parent.begin()
        parent.say("result", work(parent, *args))
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        parent.say("error", error)


def _work(
    parent: Parent,
    work: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reports: bool,
    memory: int | None,
    seconds: int | None,
) -> T:
    last = -BEAT

    def report(*values: Any) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= BEAT:  # each of thousands would wake the parent
            last = now
            parent.say("progress", values)

    if sys.platform != "win32" and seconds is None:
        os.nice(_NICENESS)
    if memory is not None:
        import psutil

        _limit("RLIMIT_AS", psutil.Process().memory_info().vms + memory)
    if seconds is not None:
        _limit("RLIMIT_CPU", seconds)
    return work(*args, **kwargs, **({"progress": report} if reports else {}))


def _limit(name: str, wanted: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY or wanted < hard:
        with suppress(ValueError, OSError):  # not every system has such a limit
            resource.setrlimit(kind, (wanted, hard))


if __name__ == "__main__":
    _main()
