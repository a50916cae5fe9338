"""Threads of programs: how they wait, and a container's share of the processor."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlite.config import threads
from kvlite.config.threads import processor_share, set_threads


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    """Control groups in which this process is in /jobs/one."""
    (tmp_path / "fs" / "jobs" / "one").mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=systemd:/other\n0::/jobs/one\n")
    return tmp_path


@pytest.mark.parametrize(
    ("one", "jobs", "share"),
    [
        ("max 100000", "max 100000", None),
        ("150000 100000", "max 100000", 1.5),
        ("300000 100000", "50000 100000", 0.5),
        ("none", "200000 0", None),
    ],
)
def test_a_containers_share(cgroups: Path, one: str, jobs: str, share: float | None) -> None:
    (cgroups / "fs" / "jobs" / "cpu.max").write_text(f"{jobs}\n")
    (cgroups / "fs" / "jobs" / "one" / "cpu.max").write_text(f"{one}\n")
    assert processor_share(cgroups / "fs", cgroups / "own") == share


def test_no_control_groups(tmp_path: Path) -> None:
    assert processor_share(tmp_path, tmp_path / "own") is None


@pytest.mark.parametrize(("share", "count"), [(None, None), (0.5, "1"), (1.5, "2"), (64.0, None)])
def test_threads_are_no_more_than_the_share(
    monkeypatch: pytest.MonkeyPatch, share: float | None, count: str | None
) -> None:
    monkeypatch.setattr(threads, "processor_share", lambda: share)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "environ", {})
    set_threads()
    assert os.environ.get("OMP_NUM_THREADS") == count
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "processor_share", lambda: 1.0)
    mine = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active"}
    monkeypatch.setattr(os, "environ", dict(mine))
    set_threads()
    assert os.environ == mine


def test_programs_set_them_before_torch_is_imported() -> None:
    code = """
import os, sys
from kvlite import __main__
sys.argv[1:] = ["--version"]
__main__._leave = lambda code: print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
__main__.main()
"""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    out = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == "passive False"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="no glibc here")
@pytest.mark.parametrize("shared", [True, False])
def test_threads_of_a_server_share_the_heap(shared: bool) -> None:
    code = f"""
import ctypes, threading
from kvlite.memory.free import share_heap
if {shared}:
    share_heap()
def allocate():
    threads.wait()
    libc.free(libc.malloc(1000))
    threads.wait()
libc, threads = ctypes.CDLL(None), threading.Barrier(9)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.free.argtypes = libc.fflush.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
for _ in range(8):
    threading.Thread(target=allocate).start()
threads.wait()
threads.wait()
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (told.stdout.count("<heap") <= 2) == shared
