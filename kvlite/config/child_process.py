"""Work done in a process of its own: it can be stopped at once, and takes no more memory than it
is allowed.

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
from functools import partial
from typing import Any, BinaryIO, TypeVar

from kvlite.errors import KvliteError, require_uncancelled

T = TypeVar("T")

# What a process is said to have ended with that the system killed.
_KILLED = -9
# By how much answers go before what is done here.
_NICENESS = 15
# Seconds between two looks at whether someone cancelled, and between two words of progress.
_BEAT = 0.05


def run_in_child(
    work: Callable[..., T],
    /,
    *args: Any,
    progress: Callable[..., None] | None = None,
    cancel: threading.Event | None = None,
    memory: int | None = None,
    **kwargs: Any,
) -> T:
    """What `work(*args, **kwargs)` returns, called in a child process.

    Args:
        work: a function at the top level of a module. It, its arguments, its result and its
            exceptions travel as pickles, so no model or tensor should.
        progress: if given, `work` gets a keyword `progress` to call; calls are repeated here, but
            for those that come too soon after another to be seen.
        cancel: set to end the child.
        memory: bytes that it may take beyond what Python takes; not held to on Windows.

    Raises:
        Stopped: `cancel` was set.
        MemoryError: the child was refused memory, or the system killed it for it.
        KvliteError: the child ended otherwise.
        Exception: whatever `work` raised.
    """
    child = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "kvlite.config.child_process",
        ],  # -P: none of the current folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert child.stdin is not None and child.stdout is not None
    said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    try:
        # The child reads on: its input stays open for as long as this process is there.
        with suppress(BrokenPipeError):  # if it has ended already, which is heard below
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
            with suppress(OSError):  # what it was to be told
                stream.close()


def _hear(stream: BinaryIO, said: "queue.SimpleQueue[tuple[str, Any]]") -> None:
    """Pass on what the child says; that it says no more is said last."""
    with suppress(Exception):  # cut short, a pickle may break in many ways
        while True:
            said.put(pickle.load(stream))
    said.put(("gone", None))


def _ended(code: int) -> Exception:
    """Why a child has ended before its work was done: the system kills what takes all memory."""
    if code == _KILLED:
        return MemoryError("a child process was killed, as for its memory")
    return KvliteError(
        f"a process that kvlite began has ended by itself (exit code {code}): try again, and "
        "report it if that happens again"
    )


def _main() -> None:
    """Do what standard input asks for, and tell standard output what comes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits for this decides
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
    say = partial(_say, out)
    try:
        work, args, kwargs, tells, memory = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        if sys.platform != "win32":
            os.nice(_NICENESS)
        if memory is not None:
            _limit(memory)
        if tells:
            kwargs["progress"] = _seldom(say)
        say("result", work(*args, **kwargs))
    except BaseException as error:
        say("error", _plain(error))


def _seldom(say: Callable[[str, Any], None]) -> Callable[..., None]:
    """What tells of progress: each call of thousands would wake the parent."""
    last = -_BEAT

    def tell(*values: Any) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _BEAT:
            last = now
            say("progress", values)

    return tell


def _say(out: BinaryIO, kind: str, value: Any) -> None:
    out.write(pickle.dumps((kind, value)))
    out.flush()


def _plain(error: BaseException) -> BaseException:
    """An error that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _limit(memory: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    import psutil

    taken = psutil.Process().memory_info().vms
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = taken + memory
    if hard == resource.RLIM_INFINITY or wanted < hard:
        with suppress(ValueError, OSError):  # not every system has such a limit
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


if __name__ == "__main__":
    _main()
