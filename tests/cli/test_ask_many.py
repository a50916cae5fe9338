"""`kvlite ask` without a question: documents are read once, questions come one by one."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvlite.cache import LayerCache
from kvlite.cache.copying import copied
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.turn import Turn
from kvlite.engine.speculate import Speculation
from kvlite.errors import OutOfMemory
from tests.cli.conftest import Run, tokens

QUESTIONS = "Who sat?\n\n  \nWho lay?\nWhere?"


@pytest.mark.long
def test_questions_from_standard_input(
    kvlite: Run, model: Path, text: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTIONS))
    flags = ("--model", model, "--max-tokens", "6", "--method", "snapkv:window=8", "--budget", "64")
    done = kvlite("ask", text, *flags, "--json")
    first, second, third = (json.loads(line) for line in done.out.splitlines())
    assert done.code == 0
    assert [message.rpartition(": ")[2] for message in said] == ["Who sat?", "Who lay?", "Where?"]
    assert [message.count("mat") for message in said] == [20, 0, 0]
    whole = tokens(model, said[0])
    # The document was read before the first question was there, and never again.
    assert 0 < first["prompt_tokens"] < 40 and first["seen_tokens"] == whole + 5
    assert second["seen_tokens"] - first["seen_tokens"] == second["prompt_tokens"] + 5
    assert third["prompt_tokens"] < 40 and third["host_kv_bytes"] > 0


@pytest.mark.long
def test_the_first_answer_is_that_of_one_question(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--model", model, "--max-tokens", "12", "--budget", "64")
    alone = kvlite("ask", text, "Who sat?", *flags, "-q").out
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTIONS))
    assert kvlite("ask", text, *flags, "-q").out.splitlines()[0] + "\n" == alone


@pytest.mark.long
def test_without_recall_the_first_question_decides_what_is_kept(
    kvlite: Run, model: Path, text: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who sat?\nWho lay?\n"))
    flags = ("--model", model, "--max-tokens", "2", "--budget", "64", "--recall", "off")
    first, second = map(json.loads, kvlite("ask", text, *flags, "--json").out.splitlines())
    assert first["prompt_tokens"] == tokens(model, said[0]) > 200 > second["prompt_tokens"]


def test_a_question_that_does_not_fit_is_said_and_others_go_on(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n" + "why " * 400 + "\nWhere?\n"))
    done = kvlite("ask", text, "--model", model, "--max-tokens", "2", "--json")
    assert done.code == 2 and len(done.out.splitlines()) == 2
    assert len(re.findall("^kvlite: .* tokens do not fit this model", done.err, re.MULTILINE)) == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_answer_that_memory_ended_is_in_the_exit_code_and_others_go_on(
    kvlite: Run, model: Path, text: Path, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, calls = Turn._enter, [0]

    def runs_out(self: Turn, token: int, speculation: Speculation) -> None:
        calls[0] += 1
        if calls[0] == 3 * which + 2:  # the second of three tokens that enter the cache
            raise OutOfMemory("there is no more: close other programs")
        enter(self, token, speculation)

    monkeypatch.setattr(Turn, "_enter", runs_out)
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTIONS))
    done = kvlite("ask", text, "--model", model, "--max-tokens", "4", "--json")
    ended = [json.loads(line)["finish_reason"] for line in done.out.splitlines()]
    expected = ["length"] * 3
    expected[which] = "memory"
    assert (done.code, ended) == (2, expected)
    assert done.err.count("there is no more") == 1


def test_no_question_at_all(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    done = kvlite("ask", text, "--model", model)
    assert (done.code, done.out) == (2, "")
    assert "standard input has no question" in done.err


@pytest.mark.long
def test_several_files_and_no_question(
    kvlite: Run, model: Path, text: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Which?\n"))
    other = text.with_name("other.md")
    other.write_text("Nothing of it")
    assert kvlite("ask", other, text, "--model", model, "--max-tokens", "1").code == 0
    assert said[0].startswith("Document: other.md\n\nNothing of it\n\nDocument: text.txt")


@pytest.mark.long
def test_at_a_terminal(model: Path, text: Path) -> None:
    """Typed into a real one; Ctrl-D ends."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvlite", "ask", text, "--model", model, "--max-tokens", "3"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PROMPT_TOOLKIT_NO_CPR": "1"}
    running = subprocess.Popen(
        list(map(str, command)), stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = Shown(ours)
    shown.until("Ctrl-D ends")
    for question in ("Who sat", "Where"):
        shown.until("?")
        os.write(ours, f"{question}\r".encode())
        assert question in shown.until("length limit")
    shown.until("?")
    os.write(ours, b"\x04")
    assert running.wait(60) == 0
    os.close(ours)


class Shown:
    """What a terminal shows, piece by piece: however much comes at once, nothing is passed over."""

    def __init__(self, terminal: int) -> None:
        self.terminal = terminal
        self.rest = ""

    def until(self, wanted: str) -> str:
        """The next of it, to the end of `wanted`."""
        end = time.monotonic() + 120
        while wanted not in self.rest:
            left = max(0, end - time.monotonic())
            assert select.select([self.terminal], [], [], left)[0], self.rest
            came = os.read(self.terminal, 4096).decode()
            self.rest += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", came)
        shown, _, self.rest = self.rest.partition(wanted)
        return shown + wanted


@pytest.mark.long
@pytest.mark.parametrize("opening", [True, False])
def test_reading_ahead_is_reading(smollm: "object", opening: bool) -> None:
    """What is read ahead and what follows are the tokens of the whole message."""
    model = smollm.model  # type: ignore[attr-defined]
    talks = []
    for ahead in (True, False):
        talk = Conversation(model, smollm.settings.replace({"max_new_tokens": 4}))  # type: ignore[attr-defined]
        if not opening:
            list(talk.stream("Hello!"))
        document = "The moon is\n\n  made of cheese. <|im_end|> So it is."
        if ahead:
            talk.read_ahead(document)
        pieces = list(talk.stream(f"{document}\n\nWhat is it made of?"))
        talks.append((talk.token_ids, [piece.token_id for piece in pieces]))
    assert talks[0] == talks[1]


@pytest.mark.long
def test_nothing_is_copied_to_go_back_to(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither questions nor lines of a chat are ever gone back to."""
    sizes: list[int] = []

    def counted(layers: Sequence[LayerCache], devices: Sequence[torch.device]) -> list[LayerCache]:
        sizes.append(sum(layer.nbytes for layer in layers))
        return copied(layers, devices)

    monkeypatch.setattr("kvlite.conversation.checkpoint.copied", counted)
    flags = ("--model", model, "--max-tokens", "4", "--budget", "64", "--recall", "off")
    assert kvlite("ask", text, "Who sat?", *flags).code == 0
    for command in ("ask", "chat"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTIONS))
        done = kvlite(command, text, *flags, "--json")
        assert done.code == 0 and len(done.out.splitlines()) == 3
    assert sum(sizes) == 0
