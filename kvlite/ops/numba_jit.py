"""Loops compiled by numba at their first use, and kept on disk.

numba keeps a function for as long as its own file stays the same, though functions of other files
are compiled into it. So all are kept in a folder that is named after the content of all files: what
another release compiled is never run, and is deleted.

A machine that compiles for long is told of it once, by `logging`, at level INFO.
"""

import inspect
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryFile
from threading import Timer
from time import monotonic
from typing import Any

import numba
from numba import types
from numba.core import config, event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from platformdirs import user_cache_path

# Sums may be formed in any order; that numbers are finite is not assumed.
ORDERLESS = {"reassoc", "contract", "nsz"}
# The files of this folder whose content is compiled.
SOURCES = ("numba_*.py", "blocks.py")
Loop = Callable[..., Any]
# Seconds that a program may compile before it says so.
PATIENCE = 2.0
_LOG = logging.getLogger("kvlite.compiling")


def jitted(loop: Loop) -> Loop:
    """Without the interpreter's lock, and kept on disk where there is a place for it."""
    return _jitted(loop, ORDERLESS)


def jitted_in_order(loop: Loop) -> Loop:
    """As `jitted`, with sums as they are written: two loops with the same sums give the same
    bits."""
    return _jitted(loop, {"contract"})


def _jitted(loop: Loop, fastmath: set[str]) -> Loop:
    made: Any = numba.njit(fastmath=fastmath, nogil=True)(loop)
    typed = made.get_call_template
    # numba would compile it once more for every number that a call has in writing.
    made.get_call_template = lambda args, kws: typed(tuple(map(types.unliteral, args)), kws)
    if cache_folder() is not None:
        made._cache = _Cache(loop)
    compiled: Loop = made
    return compiled


@cache
def cache_folder() -> Path | None:
    """Where compiled loops are kept, if any place can be written to. A new folder takes the place
    of all older ones of this installation."""
    name = _name()
    for place in _places() if name else ():
        folder = place / name
        is_new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError:
            continue
        if is_new:
            _delete_others(folder)
        return folder
    return None


def _name() -> str:
    """The name of the folder; empty if there are no files to name it after, as in an archive."""
    found = sorted(each for one in SOURCES for each in Path(__file__).parent.glob(one))
    content = "".join(_digest(str(each)) for each in found)
    digest = sha256(content.encode()).hexdigest()[:16]
    return content and f"kvlite-{digest}-{numba.__version__}"


@cache
def _digest(path: str) -> str:
    return sha256(Path(path).read_bytes()).hexdigest()


def _places() -> Iterator[Path]:
    own = _CacheLocator.get_suitable_cache_subpath(__file__)
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR) / own
    yield Path(__file__).parent / "__pycache__"
    yield user_cache_path("numba", appauthor=False) / own


def _delete_others(folder: Path) -> None:
    # What this release compiled by another numba stays: environments may share the files.
    own = folder.name.removesuffix(numba.__version__)
    for each in folder.parent.glob("kvlite-*"):
        if not each.name.startswith(own):
            shutil.rmtree(each, ignore_errors=True)
    for each in folder.parent.glob("numba_*.nb[ci]"):
        with suppress(OSError):
            each.unlink()


class _Slow(event.Listener):  # type: ignore[misc]
    """Says once that all compiling so far took `PATIENCE`. Loops are compiled one at a time, though
    within others; what comes from the disk is not."""

    def __init__(self) -> None:
        self._spent, self._begun, self._depth, self._said = 0.0, 0.0, 0, False
        self._timer = Timer(0, self._say)

    def on_start(self, event: Any) -> None:
        self._depth += 1
        if self._depth == 1 and not self._said:
            self._begun = monotonic()
            self._timer = Timer(max(0, PATIENCE - self._spent), self._say)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._timer.cancel()
            self._spent += monotonic() - self._begun

    def _say(self) -> None:
        self._said = True
        often = "once" if cache_folder() else "as every time: there is no folder to keep them in"
        _LOG.info(f"Compiling loops for this processor, {often}. What comes first waits for them.")


event.register("numba:compile", _Slow())


class _Locator(_CacheLocator):  # type: ignore[misc]
    def __init__(self, loop: Loop, file: str) -> None:
        self._py_file, self._line = file, loop.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Loop, py_file: str) -> "_Locator":
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return _digest(self._py_file)

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    """Always here, whatever locators numba is told to use: theirs would keep stale functions."""

    def __init__(self, py_func: Loop) -> None:
        file = inspect.getfile(py_func)
        self._lineno, self._locator = py_func.__code__.co_firstlineno, _Locator(py_func, file)
        name = f"{Path(file).stem}.{py_func.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))


class _Cache(FunctionCache):  # type: ignore[misc]
    """Does without a folder that is full, damaged, or there no longer."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(OSError):
            try:
                return super().load_overload(sig, target_context)
            except (EOFError, UnpicklingError):  # the power failed while it was written
                self.flush()

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)
