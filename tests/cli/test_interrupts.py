"""Ctrl-C ends what is going on, and loses nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlite.cli.screen import ReadingBar
from kvlite.engine.detokenizer import TextStream
from tests.cli.conftest import Done, Run

INTERRUPTED, TERMINATED = 130, 143


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


def test_a_closed_pipe_ends_it_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)  # as `| head` does once it has enough
    command = [sys.executable, "-m", "kvlite", "methods"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.long
def test_interrupted_while_reading(model: Path, text: Path) -> None:
    args = ("ask", text, "What?", "--model", model, "--chunk", "64")
    done = interrupted("kvlite.cli.screen", "ReadingBar", "update", 2, *args)
    assert done == Done(INTERRUPTED, "", "Stopped while reading; nothing was answered.\n")


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

    monkeypatch.setattr("kvlite.conversation.runner.load_model", interrupt)
    assert kvlite("ask", text, "What?") == Done(INTERRUPTED, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_a_destructor_is_not_lost(
    kvlite: Run, text: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    class Deleted:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def load_model(*_: object, **__: object) -> None:
        Deleted()
        time.sleep(600)
        raise AssertionError("went on")

    monkeypatch.setattr("kvlite.conversation.runner.load_model", load_model)
    assert kvlite("ask", text, "What?") == Done(128 + number, "", "")


def test_ends_soon_after_a_signal(model: Path, text: Path) -> None:
    """Without the second that Python takes to tear torch down."""
    code = """
import atexit, signal, sys, time
begun = time.monotonic()
class Slow:
    def __del__(self):
        time.sleep(600)
sys.modules["slow"] = Slow()
atexit.register(lambda: print("tidied up", flush=True))
import kvlite.conversation.runner
def load_model(*_, **__):
    signal.raise_signal(signal.SIGTERM)
kvlite.conversation.runner.load_model = load_model
from kvlite.__main__ import main
main()
"""
    command = [sys.executable, "-c", code, "ask", str(text), "What?", "--model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert Done(done.returncode, done.stdout, done.stderr) == Done(TERMINATED, "tidied up\n", "")
