"""The program that reads documents: missing, killed, hung, ended, and ended with who began it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvlite.documents import pandoc

from .files import Save, refusal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the program is a shell script")


FORMULA = "<p>words <math><mn>1</mn></math>"


def _program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "pypandoc" / "files").mkdir(parents=True)
    (folder / "pypandoc" / "__init__.py").touch()
    program = folder / "pypandoc" / "files" / "pandoc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755 if script else 0)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "needs pandoc, which is missing: pip install pypandoc_binary"),
        ("kill -9 $$", "takes more memory to open than there is"),
        ("exit 251", "takes more memory to open than there is"),
        ("exit 64", "is damaged or no HTML page"),
        ("echo ''", "is damaged or no HTML page"),
    ],
)
def test_what_becomes_of_it_is_said_in_a_sentence(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    _program(tmp_path / "fake", monkeypatch, script)
    assert said in refusal(save("a.html", FORMULA))


def test_what_hangs_is_stopped(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pandoc, "_SECONDS", 1)
    _program(tmp_path / "fake", monkeypatch, "exec sleep 600")
    assert "takes more than 1 seconds to read" in refusal(save("a.html", FORMULA))


def test_it_ends_with_its_parent(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    _program(tmp_path / "fake", monkeypatch, f"echo $$ > {pid}; exec sleep 600")
    code = f"from kvlite.documents import read_document; read_document({save('a.html', FORMULA)!r})"
    path = os.pathsep.join([str(tmp_path / "fake"), os.getcwd(), *filter(None, sys.path)])
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    running = psutil.Process(int(pid.read_text()))
    parent.kill()
    parent.wait()
    psutil.wait_procs([running], timeout=60)
    assert not running.is_running()
