"""Recall's loops are compiled while a prompt is read, and nobody waits for what is not needed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlite.cache import KVBits, LayerCache, Selection
from kvlite.offload import HostKVStore, Recall
from kvlite.offload.kv.index import Index
from kvlite.offload.kv.recall import begin_compiling, filled_with_nothing
from kvlite.offload.kv.store import HostKVLayer
from tests.conftest import Tiny

from .test_packed import random_ids
from .test_recall import chat, full_head_group

if find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from kvlite.ops import numba_ahead, numba_rows
from kvlite.ops.numba_recall import fill
from kvlite.ops.numba_search import add, search

CPU = torch.device("cpu")


def test_what_is_compiled_is_what_is_used() -> None:
    thread = begin_compiling(CPU)
    assert thread is not None and begin_compiling(CPU) is thread
    thread.join()
    # The thread is silent about what fails, and other tests may have compiled what it could not.
    numba_ahead.compile_all(lambda: True, True, filled_with_nothing())
    loops = (search, add, fill)
    assert [len(loop.signatures) for loop in loops] == [1, 1, 1]
    everything = full_head_group(300)
    keys = everything.head_groups[0].keys
    queries = torch.randn(1, 3, 4, 64)
    index = Index.of(keys, queries.square().sum(2), 10)
    store = HostKVStore([HostKVLayer(everything, None, 300, index)], None, seen=300)
    index.add(keys[:, :, :5])
    for heads, capacity, bits in (
        ((0, 1, 2), 60, None),
        ((1,), 60, KVBits(8, 4)),
        ((0, 2), 75, None),
    ):
        at = torch.arange(0, 180, 3).expand(1, len(heads), -1)
        head_group = LayerCache.gathered(
            [Selection(everything.head_groups[0], at, heads)], [capacity], bits=bits
        ).head_groups[0]
        recall = Recall(store, 30)
        own = queries[:, : len(heads)]
        recall.bring_back(0, head_group, own, recall.scores(0, queries))
        assert recall.num_fetched > 0
    rows, line = queries[:, :, :2].contiguous().numpy(), [0] * (numba_rows.COUNT + 1)
    own = everything.head_groups[0].residual_positions
    line[:5] = keys.data_ptr(), keys.data_ptr(), own.data_ptr(), keys.shape[2], 200
    numba_rows.attend(
        rows, rows[:, :, 0].copy(), rows[:, :, 1].copy(), [line], 2, None, (16, 4, 4, 16)
    )
    assert [len(loop.signatures) for loop in loops] == [1, 1, 1]
    for packs in (False, True):
        work: Any = numba_rows.WORKS[True, packs]
        assert work.cache_info().currsize == 1


def test_nothing_more_is_compiled_than_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Loop:
        def __init__(self, name: str) -> None:
            self.name = name

        def compile(self, given: Any) -> None:
            done.append(self.name)

    for name in ("search", "add"):
        monkeypatch.setattr(numba_ahead, name, Loop(name))
    numba_ahead.compile_all(lambda: len(done) < 2, True, filled_with_nothing())
    assert done == ["search", "add"]


@pytest.mark.long
def test_a_program_that_ends_does_not_wait_for_all_of_it(tmp_path: Path) -> None:
    script = (
        "import torch; from kvlite.offload.kv.recall import begin_compiling\n"
        "begin_compiling(torch.device('cpu'))\n"
        "raise KeyboardInterrupt"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert run.returncode != 0 and run.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "Fatal" not in run.stderr and not list(tmp_path.rglob("numba_rows*"))


def test_it_begins_where_a_turn_recalls(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[torch.device, bool]] = []

    def begin(device: torch.device, *, everything: bool) -> None:
        begun.append((device, everything))

    monkeypatch.setattr("kvlite.conversation.turn.begin_compiling", begin)
    for settings, wanted in (
        ({"recall": "off"}, []),
        ({"recall_entries": 0}, []),
        ({"budget": 200}, []),
        ({}, [(CPU, False)]),
        ({"kv_bits": "8"}, [(CPU, True)]),
        ({"recall_bits": "4"}, [(CPU, True)]),
    ):
        begun.clear()
        chat(llama.model, **settings).read(random_ids(90)[0].tolist())
        assert begun == wanted


def test_there_is_nothing_to_compile_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin_compiling(torch.device("cuda")) is None
    monkeypatch.setattr("kvlite.offload.kv.recall.has_compiled", lambda device: False)
    assert begin_compiling.__wrapped__(CPU) is None
