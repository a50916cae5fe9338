"""Work that threads share on a CPU."""

import re
from importlib.util import find_spec
from multiprocessing import get_context

import numpy as np
import pytest
import torch

if find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

import llvmlite.binding as llvm
from numba import types

from kvlite.ops import numba_threads as threads

COUNTS = types.int64[::1]
_given = threads.reading(COUNTS)


@threads.work
def _count(address, part):
    _given(address)[part] += 1


@threads.work
def _wait(address, part):
    """The last part, which is begun first, waits for another a while, and says whether it came."""
    counts = _given(address)
    if part == 0:
        threads._add(counts, 0, 1)
    else:
        for looks in range(threads.PATIENCE):
            threads._rest(looks)
            counts[1] = threads._read(counts, 0)


@threads.work
def _fail_at_first(address, part):
    counts = _given(address)
    counts[part] += 1
    if part == 1 and counts[part] < 3:
        raise ValueError("not enough")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def wait_for_another() -> None:
    """Sooner or later another thread does a part: it may be long on its way."""
    for _ in range(100_000):
        counts = np.zeros(2, np.int64)
        threads.share(threads.board(), _wait(), counts, counts.size)
        if counts[1]:
            return
    raise AssertionError("nobody came")


@pytest.mark.usefixtures("two")
def test_another_thread_does_a_part() -> None:
    """In a process that was forked, too, while the threads of the other were on the board."""
    wait_for_another()
    child = get_context("fork").Process(target=wait_for_another)
    threads.board()[threads.TAKEN] = 1
    try:
        child.start()
    finally:
        threads.board()[threads.TAKEN] = 0
    child.join(120)
    child.kill()
    child.join()
    assert child.exitcode == 0


@pytest.mark.usefixtures("two")
def test_every_part_is_done_once_whoever_does_it() -> None:
    for parts in (1, 2, 7, 100):
        counts = np.zeros(parts, np.int64)
        for _ in range(50):
            threads.share(threads.board(), _count(), counts, counts.size)
        assert counts.tolist() == [50] * parts


@pytest.mark.usefixtures("two")
def test_a_part_that_fails_raises_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Once it was done again, and failed again; nothing is printed in another thread."""
    for board, failing in ((threads.board(), [2]), (threads.NOBODY, [1, 2])):
        counts = np.zeros(3, np.int64)
        for tries in failing:
            with pytest.raises(ValueError, match="not enough"):
                threads.share(board, _fail_at_first(), counts, counts.size)
            assert counts[1] == tries
        threads.share(board, _fail_at_first(), counts, counts.size)
        assert counts[1] == 3 and counts.all()
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("two")
def test_a_board_in_use_is_left_alone() -> None:
    """Of two programs that answer at once, one works by itself."""
    board = threads.board()
    board[threads.TAKEN] = 1
    try:
        counts = np.zeros(3, np.int64)
        threads.share(board, _count(), counts, counts.size)
        assert counts.tolist() == [1, 1, 1] and board[threads.LEFT] == 0
    finally:
        board[threads.TAKEN] = 0


def test_one_thread_has_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert threads.board().size == 0


@pytest.mark.parametrize(("machine", "named"), [("x86_64", "pause"), ("aarch64", "isb")])
def test_a_processor_is_told_to_wait(machine: str, named: str) -> None:
    """What LLVM is asked for is an instruction there."""
    name, number = threads.PAUSES[machine]
    kind, given = ("", "") if number is None else ("i32", f"i32 {number}")
    body = f"call void @{name}({given}) ret void"
    module = llvm.parse_assembly(f"declare void @{name}({kind}) define void @f() {{ {body} }}")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(f"{machine}-unknown-linux-gnu").create_target_machine()
    assert re.search(rf"^\s*{named}\s*$", target.emit_assembly(module), re.MULTILINE)
