"""Work in a process of its own: its result, its errors, its end."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvlite.config.child_process import run_in_child
from kvlite.errors import DocumentError, KvliteError, Stopped


def double(number: int) -> int:
    print("libraries print", number)
    return 2 * number


def count(upto: int, progress: Callable[[int, int], None]) -> str:
    now = 0
    time.monotonic = lambda: now  # of this process alone
    for number in range(upto):
        now += 1
        progress(number + 1, upto)
        progress(number + 1, upto)  # too soon to be seen
    return "counted"


def refuse(name: str) -> None:
    raise DocumentError(f"{name} is refused")


def write_pid_and_sleep(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


class OddError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def fail_oddly() -> None:
    raise OddError("this", "that")


def leave(_: str) -> None:
    os._exit(3)


def die() -> None:
    os.kill(os.getpid(), 9)


def test_results_and_progress_come_back_whatever_is_printed() -> None:
    assert run_in_child(double, 21) == 42
    seen = list[tuple[int, int]]()
    assert run_in_child(count, 3, progress=lambda *at: seen.append(at)) == "counted"
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_errors_keep_their_type_and_sentence() -> None:
    with pytest.raises(DocumentError, match=r"a\.pdf is refused"):
        run_in_child(refuse, "a.pdf")
    with pytest.raises(RuntimeError, match="OddError: this and that"):
        run_in_child(fail_oddly)


def test_a_child_that_ends_is_an_error() -> None:
    with pytest.raises(MemoryError, match="killed"):
        run_in_child(die)
    with pytest.raises(KvliteError, match="exit code 3"):
        run_in_child(os._exit, 3)
    with pytest.raises(KvliteError, match="exit code 3"):
        run_in_child(leave, "x" * 10_000_000)


def test_nothing_of_the_current_folder_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue", "pickle", "resource"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert run_in_child(abs, -3) == 3


def _begun(path: Path) -> psutil.Process:
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    return psutil.Process(int(path.read_text()))


def test_cancel_ends_the_child(tmp_path: Path) -> None:
    path, cancel = tmp_path / "pid", threading.Event()
    found = list[psutil.Process]()

    def stop() -> None:
        found.append(_begun(path))
        cancel.set()

    threading.Thread(target=stop).start()
    with pytest.raises(Stopped):
        run_in_child(write_pid_and_sleep, str(path), cancel=cancel)
    assert not found[0].is_running()


@pytest.mark.long
def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    script = tmp_path / "script.py"  # without a guard, as people write them
    script.write_text(
        textwrap.dedent(f"""
        from kvlite.config.child_process import run_in_child
        from tests.test_child_process import write_pid_and_sleep
        run_in_child(write_pid_and_sleep, {str(path)!r})
        """)
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    parent = subprocess.Popen([sys.executable, str(script)], env=env)
    child = _begun(path)
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=120)
    assert not child.is_running()
