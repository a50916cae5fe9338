"""Work in a child process, which can be stopped at once and has a memory limit.

The child is another Python that runs this module: unlike `multiprocessing` it never imports the
caller's own script. It ends with its parent, however that ends.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

from kvlite.errors import KvliteError, require_uncancelled

T = TypeVar("T")

# The exit code of a process that the system killed.
_KILLED = -9
# Answers go first.
_NICENESS = 15
# Seconds between checks for cancellation, and between reports of progress.
_BEAT = 0.05


class ChildEnded(KvliteError):
    """A child process ended before its work was done."""


def run_in_child(
    work: Callable[..., T],
    /,
    *args: Any,
    progress: Callable[..., None] | None = None,
    cancel: threading.Event | None = None,
    memory: int | None = None,
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

    Raises:
        Stopped: `cancel` was set.
        MemoryError: the child ran out of memory, or the system killed it.
        ChildEnded: it ended in another way.
        Exception: whatever `work` raised.
    """
    child = subprocess.Popen(
        # -P: import nothing from the current folder
        [sys.executable, "-P", "-m", "kvlite.config.child_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert child.stdin is not None and child.stdout is not None
    said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    try:
        # Its input stays open: the child ends when it is closed, that is, when this process ends.
        with suppress(BrokenPipeError):  # the child has ended already, as is found below
            pickle.dump((work, args, kwargs, progress is not None, memory), child.stdin)
            child.stdin.flush()
        threading.Thread(target=_hear, args=(child.stdout, said), daemon=True).start()
        while True:
            require_uncancelled(cancel)
            try:
                kind, value = said.get(timeout=_BEAT)
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
                raise _ended(child.wait())
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            with suppress(OSError):  # unsent data is lost
                stream.close()


def _hear(stream: BinaryIO, said: "queue.SimpleQueue[tuple[str, Any]]") -> None:
    """Pass on the child's messages, and at the end that there are no more."""
    with suppress(Exception):  # a pickle that is cut short may break in many ways
        while True:
            said.put(pickle.load(stream))
    said.put(("gone", None))


def _ended(code: int) -> Exception:
    """Why a child ended before its work was done."""
    if code == _KILLED:
        return MemoryError("a child process was killed, as for its memory")
    return ChildEnded(
        f"a process that kvlite began has ended by itself (exit code {code}): try again, and "
        "report it if that happens again"
    )


def _main() -> None:
    """Do the work that standard input describes, and write messages to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print

    def say(kind: str, value: Any) -> None:
        out.write(pickle.dumps((kind, value)))
        out.flush()

    last = -_BEAT

    def report(*values: Any) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _BEAT:  # each of thousands would wake the parent
            last = now
            say("progress", values)

    try:
        work, args, kwargs, reports, memory = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        if sys.platform != "win32":
            os.nice(_NICENESS)
        if memory is not None:
            _limit(memory)
        if reports:
            kwargs["progress"] = report
        say("result", work(*args, **kwargs))
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        say("error", error)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _limit(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    import psutil

    wanted = psutil.Process().memory_info().vms + memory
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or wanted < hard:
        with suppress(ValueError, OSError):  # not every system has such a limit
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


if __name__ == "__main__":
    _main()
