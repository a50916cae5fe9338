"""Ctrl-C ends what is going on, and loses nothing."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvlite.cli.screen import ReadingBar
from kvlite.engine.text import TextStream
from tests.cli.conftest import Done, Run

INTERRUPTED = 130


def interrupted(module: str, owner: str, method: str, call: int, *args: object) -> Done:
    """The program in a process of its own, sent SIGINT at the given call of a method."""
    code = f"""
import signal
from {module} import {owner} as owner
before = owner.{method}
def watched(self, *args):
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls == {call}:
        signal.raise_signal(signal.SIGINT)
    return before(self, *args)
owner.{method} = watched
from kvlite.cli.main import main
main()
"""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


def test_interrupted_before_it_has_begun() -> None:
    code = """
import signal, sys
class Slow:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Slow())
from kvlite.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert Done(done.returncode, done.stdout, done.stderr) == Done(INTERRUPTED, "", "")


def test_interrupted_while_reading(model: Path, text: Path) -> None:
    args = ("ask", text, "What?", "--model", model, "--chunk", "64")
    done = interrupted("kvlite.cli.screen", "ReadingBar", "update", 2, *args)
    assert done == Done(INTERRUPTED, "", "Stopped while reading; nothing was answered.\n")


def test_interrupted_while_answering(kvlite: Run, model: Path, text: Path) -> None:
    args = ("ask", text, "What?", "--model", model)
    begun = kvlite(*args, "--max-tokens", "3").out
    done = interrupted("kvlite.engine.text", "TextStream", "push", 3, *args)
    assert (done.code, done.out) == (INTERRUPTED, begun)
    assert re.fullmatch(r"read .* · interrupted\n", done.err)


def test_interrupted_while_answering_in_json(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = TextStream.push

    def interrupt(self: TextStream, token: int) -> str:
        if len(self.ids) == 4:
            signal.raise_signal(signal.SIGINT)
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", interrupt)
    before = signal.getsignal(signal.SIGINT)
    done = kvlite("ask", text, "What?", "--model", model, "--json")
    assert signal.getsignal(signal.SIGINT) is before
    answer = done.json()
    assert (done.code, done.err.count("\n")) == (INTERRUPTED, 0)
    assert (answer["finish_reason"], answer["generated_tokens"]) == ("interrupted", 5)
    assert answer["answer"]


def test_second_interrupt_waits_for_nothing(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr(ReadingBar, "update", update)
    assert kvlite("ask", text, "What?", "--model", model) == Done(INTERRUPTED, "", "")


def test_interrupted_while_loading(
    kvlite: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvlite.runner.load_model", interrupt)
    assert kvlite("ask", text, "What?") == Done(INTERRUPTED, "", "")
