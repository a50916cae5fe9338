"""Commands need no module or function that POSIX systems alone have."""

import subprocess
import sys
from pathlib import Path

import pytest

# Libraries come first: on Linux they use what is hidden from kvlite.
HIDE = """
import os, signal, sys
import filelock, numba, platformdirs, psutil, torch, transformers
from kvlite.__main__ import main
for name in ("resource", "termios", "fcntl", "pwd", "grp", "tty", "pty"):
    sys.modules[name] = None
for name in ("posix_fallocate", "getloadavg", "killpg", "setsid", "mkfifo"):
    delattr(os, name)
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "pthread_sigmask"):
    delattr(signal, name)
main()
"""


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.long
def test_a_document_is_asked_about_with_what_is_dropped_on_disk(model: Path, text: Path) -> None:
    given = ["--model", model, "--budget", 32, "--max-tokens", 3, "--recall", "disk"]
    done = run("ask", text, "Who sat?", *given)
    assert (done.returncode, done.stderr.count("recalled")) == (0, 1), done.stderr


@pytest.mark.long
def test_the_machine_is_checked() -> None:
    done = run("doctor", "--quick")
    assert done.returncode in (0, 1)
    assert "host memory" in done.stdout, done.stderr
