"""Loops are compiled while a model is loaded and a prompt is read, and nobody waits for what is
not needed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvlite.ops.compile_ahead import begin_compiling
from kvlite.ops.loops import Loops
from tests.conftest import Tiny

from .test_packed import random_ids
from .test_recall import chat

if find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from kvlite.ops import compiled_loops

CPU = torch.device("cpu")


def python(tmp_path: Path, script: str) -> "subprocess.CompletedProcess[str]":
    """A program that has nothing compiled yet."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )


@pytest.mark.long
def test_what_is_compiled_ahead_is_all_that_answers_use(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The code of room {room} is {room * 37}." for room in range(40)))
    script = f"""
import sys
from numba.core import event
from kvlite.cli.main import main
from kvlite.ops.loops import Loops
from kvlite.ops.compiled_loops import compile_all

class Late(event.Listener):
    def on_start(self, event):
        print("late:", event.data["dispatcher"])
    def on_end(self, event):
        pass

compile_all([*Loops])
event.register("numba:compile", Late())
both = ["What is the code of room 9?", "What is the code of room 29?"]
for more in ([], ["--budget", "200"], ["--budget", "200", "--kv-bits", "8"]):
    try:
        sys.argv = ["kvlite", "ask", {str(text)!r}, *both, "--max-tokens", "3", *more]
        main()
    except SystemExit as ended:
        print("ended:", ended.code or 0)
"""
    run = python(tmp_path / "compiled", script)
    assert run.stdout.count("ended: 0") == 3 and "late" not in run.stdout, run.stdout + run.stderr


def test_nothing_more_is_compiled_than_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    loops = {each: lambda name=each.name: [lambda: done.append(name)] for each in Loops}
    monkeypatch.setattr(compiled_loops, "_COMPILED", loops)
    compiled_loops.compile_all([Loops.STEP, Loops.CODES, Loops.RECALL], lambda: len(done) < 2)
    assert done == ["STEP", "CODES"]


@pytest.mark.long
def test_a_program_that_ends_does_not_wait_for_all_of_it(tmp_path: Path) -> None:
    run = python(
        tmp_path,
        "import torch\n"
        "from kvlite.ops.compile_ahead import begin_compiling\n"
        "from kvlite.ops.loops import Loops\n"
        "begin_compiling(torch.device('cpu'), Loops.PACKED, Loops.STEP)\n"
        "raise KeyboardInterrupt",
    )
    assert run.returncode != 0 and run.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "Fatal" not in run.stderr and not list(tmp_path.rglob("numba_rows*"))


def test_it_begins_with_what_a_turn_needs(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[set[Loops]] = []

    def begin(device: torch.device, *loops: Loops) -> None:
        begun.append({*loops})

    monkeypatch.setattr("kvlite.conversation.turn.begin_compiling", begin)
    step, recall = {Loops.STEP}, {Loops.STEP, Loops.RECALL}
    for settings, wanted in (
        ({"recall": "off"}, step),
        ({"recall_entries": 0}, step),
        ({"budget": 200}, step),
        ({}, recall),
        ({"kv_bits": "8"}, recall | {Loops.CODES, Loops.CODES_BACK, Loops.RECALL_ALONE}),
        ({"recall_bits": "4"}, recall | {Loops.CODES_BACK}),
    ):
        begun.clear()
        chat(llama.model, **settings).read(random_ids(90)[0].tolist())
        assert begun == [wanted]


def test_there_is_nothing_to_compile_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin_compiling(torch.device("cuda"), Loops.STEP) is None
    monkeypatch.setattr("kvlite.ops.compile_ahead.has_compiled", lambda device: False)
    assert begin_compiling.__wrapped__(CPU, Loops.STEP) is None
