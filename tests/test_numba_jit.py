"""Compiled loops are kept for as long as nothing changes that is compiled into them."""

import re
import shutil
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from numba.core import config, event

from kvlite.ops import numba_jit

CALLEE = """
from loops.numba_jit import jitted

@jitted
def number():
    return {}
"""
CALLER = """
from loops.numba_jit import jitted
from loops.numba_callee import number

@jitted
def twice():
    return 2 * number()
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """A package with a function that is compiled into another file's, in a program of its own."""
    package = tmp_path / "loops"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "numba_caller.py").write_text(CALLER)
    shutil.copy(numba_jit.__file__, package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setitem(event._registered, "numba:compile", [])  # others hear nothing of it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def started(number: int) -> Any:
        (package / "numba_callee.py").write_text(CALLEE.format(number))
        for each in [name for name in sys.modules if name.split(".")[0] == "loops"]:
            monkeypatch.delitem(sys.modules, each)
        return import_module("loops.numba_caller").twice

    return started


def hits(loop: Any) -> int:
    return sum(loop.stats.cache_hits.values())


def test_a_release_that_changes_a_callee_runs_no_old_code(
    release: Callable[[int], Any], tmp_path: Path
) -> None:
    kept = tmp_path / "loops" / "__pycache__"
    assert release(1)() == 2
    (before,) = kept.iterdir()
    (kept / "numba_caller.twice-5.py39.nbi").touch()
    same = release(1)
    assert (same(), hits(same)) == (2, 1)
    new = release(3)
    assert (new(), hits(new)) == (6, 0)
    (after,) = kept.iterdir()
    assert after != before


def test_what_cannot_be_kept_is_compiled(release: Callable[[int], Any], tmp_path: Path) -> None:
    """Beside the files, for the user, or nowhere."""
    beside, users = tmp_path / "loops" / "__pycache__", tmp_path / "cache"
    beside.touch()
    assert release(1)() == 2 and [*users.rglob("kvlite-*")]
    loop = release(1)
    shutil.rmtree(users)
    users.touch()
    assert loop() == 2
    assert release(1)() == 2 and sys.modules["loops.numba_jit"].cache_folder() is None


def test_what_was_half_written_is_compiled_anew(
    release: Callable[[int], Any], tmp_path: Path
) -> None:
    assert release(1)() == 2
    kept = tmp_path / "loops" / "__pycache__"
    for index in kept.rglob("*.nbi"):
        index.write_bytes(b"")
    again = release(1)
    assert (again(), hits(again)) == (2, 0)
    again = release(1)
    assert (again(), hits(again)) == (2, 1)


def test_long_compiling_is_logged_once(
    release: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvlite.compiling")
    for number, patience, said in ((1, 600, 0), (3, 0, 1), (3, 0, 1)):
        loop = release(number)
        sys.modules["loops.numba_jit"].PATIENCE = patience  # type: ignore[attr-defined]
        assert loop() == 2 * number
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(60)
        assert [each.message[:9] for each in caplog.records] == ["Compiling"] * said


def test_numbas_own_locators_are_not_asked(
    release: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would keep what was compiled of a callee that has changed."""
    for locator in ("UserWideCacheLocator", "nowhere.Locator"):
        monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", locator)
        assert (release(1)(), release(3)()) == (2, 6)
        assert len([*(tmp_path / "loops" / "__pycache__").iterdir()]) == 1


def test_all_that_is_compiled_is_known() -> None:
    """Numbers of other files become constants of compiled loops."""
    folder = Path(numba_jit.__file__).parent
    sources = {each for one in numba_jit.SOURCES for each in folder.glob(one)}
    assert len(sources) > 15
    for each in sources:
        for name in re.findall(r"^from kvlite\.(\S+) import", each.read_text(), re.MULTILINE):
            assert name == "ops" or folder / f"{name.removeprefix('ops.')}.py" in sources
