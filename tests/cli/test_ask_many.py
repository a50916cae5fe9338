"""Several questions: documents are read once; given at once they are answered together, from
standard input one by one."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlite.cli.ask_each import sorted_out
from kvlite.conversation.context import Context
from kvlite.conversation.turn import Turn
from kvlite.engine.rows_attender import StepsAttender
from kvlite.engine.speculate import Speculation
from kvlite.errors import OutOfMemory, SettingError
from tests.cli.conftest import Refused, Run, Typed, tokens

QUESTIONS = ("Who sat?", "Who lay by the door?", "Where?")
FLAGS = ("--max-tokens", "6", "--budget", "64")


def test_each_answer_is_that_of_one_question(kvlite: Run, model: Path, text: Path) -> None:
    flags = ("--model", model, *FLAGS)
    made = json.loads(kvlite("ask", text, *QUESTIONS, *flags, "--json").out)
    assert [each["question"] for each in made] == [*QUESTIONS]
    assert [each["together"] for each in made] == [3, 3, 3]
    for question, each in zip(QUESTIONS[1:], made[1:], strict=True):
        one = kvlite("ask", text, question, *flags, "--json").json()
        assert one["answer"] == each["answer"]
        assert each["prompt_tokens"] < 40 < one["prompt_tokens"]
        assert each["ahead_tokens"] + each["prompt_tokens"] == one["prompt_tokens"]
        assert each["ahead_s"] == made[0]["ahead_s"] > 0 == one["ahead_tokens"]
    done = kvlite("ask", text, *QUESTIONS, *flags)
    shown = "".join(
        f"{at}. {each['question']}\n{each['answer']}\n" for at, each in enumerate(made, 1)
    )
    assert (done.code, done.out) == (0, shown)
    assert done.err.count("stopped at the length limit") == 3
    assert len(re.findall(r"read \d+ tokens in \d+\.\d s, then \d+ ·", done.err)) == 3


def test_questions_from_standard_input(
    kvlite: Run, model: Path, text: Path, said: list[str], typed: Typed
) -> None:
    flags = ("--model", model, "--max-tokens", "6", "--method", "snapkv:window=8", "--budget", "64")
    typed("Who sat?\n\n  \nWho lay?\nWhere?")
    done = kvlite("ask", text, *flags, "--json")
    first, second, third = done.rows
    assert done.code == 0
    assert [message.rpartition(": ")[2] for message in said] == ["Who sat?", "Who lay?", "Where?"]
    assert [message.count("mat") for message in said] == [20, 0, 0]
    whole = tokens(model, said[0])
    # The document was read before the first question was there, and never again.
    assert 0 < first["prompt_tokens"] < 40 and first["seen_tokens"] == whole + 5
    assert second["seen_tokens"] - first["seen_tokens"] == second["prompt_tokens"] + 5
    assert third["prompt_tokens"] < 40 and third["host_kv_bytes"] > 0
    assert kvlite("ask", text, "Who sat?", *flags, "--json").json()["answer"] == first["answer"]


@pytest.mark.long
def test_without_recall_the_first_question_decides_what_is_kept(
    kvlite: Run, model: Path, text: Path, said: list[str], typed: Typed
) -> None:
    typed("Who sat?\nWho lay?\n")
    flags = ("--model", model, "--max-tokens", "2", "--budget", "64", "--recall", "off")
    first, second = kvlite("ask", text, *flags, "--json").rows
    assert first["prompt_tokens"] == tokens(model, said[0]) > 200 > second["prompt_tokens"]


def test_a_question_that_does_not_fit_is_said_and_others_go_on(
    kvlite: Run, model: Path, text: Path, typed: Typed
) -> None:
    flags = ("--model", model, "--max-tokens", "2", "--json")
    done = kvlite("ask", text, "Who?", "why " * 400, "Where?", *flags)
    made = json.loads(done.out)
    given = [sorted({"answer", "error"} & {*each}) for each in made]
    assert (done.code, given) == (2, [["answer"], ["error"], ["answer"]])
    assert "do not fit this model" in made[1]["error"]
    for command in (["ask", text], ["chat"]):
        typed("Who?\n" + "why " * 600 + "\nWhere?\n")
        done = kvlite(*command, *flags)
        assert (done.code, len(done.rows)) == (2, 2)
        said = re.findall("^kvlite: .* tokens do not fit this model", done.err, re.MULTILINE)
        assert len(said) == 1


def test_an_answer_that_memory_ended_is_in_the_exit_code_and_others_go_on(
    kvlite: Run, model: Path, text: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, calls = Turn._enter, [0]

    def runs_out(self: Turn, token: int, speculation: Speculation) -> None:
        calls[0] += 1
        if calls[0] == 5:  # of three of each answer
            raise OutOfMemory("there is no more: close other programs")
        enter(self, token, speculation)

    monkeypatch.setattr(Turn, "_enter", runs_out)
    typed("Who sat?\nWho lay?\nWhere?")
    done = kvlite("ask", text, "--model", model, "--max-tokens", "4", "--json")
    ended = [each["finish_reason"] for each in done.rows]
    assert (done.code, ended) == (2, ["length", "memory", "length"])
    assert done.err.count("there is no more") == 1


def test_no_question_at_all(kvlite: Run, model: Path, text: Path, typed: Typed) -> None:
    typed(" \n")
    done = kvlite("ask", text, "--model", model)
    assert (done.code, done.out) == (2, "")
    assert "standard input has no question" in done.err


def test_an_interrupt_keeps_what_is_finished(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second step of answers, and while the second question is read."""
    attend, read, seen = StepsAttender.attend, Context.read_in_slices, list[int]()
    asked = ("ask", text, *QUESTIONS, "--model", model, *FLAGS, "--json")

    def interrupts(self: StepsAttender, *args: object) -> object:
        seen.append(len(self.steps))
        if len(seen) == 6:  # the model has four layers
            signal.raise_signal(signal.SIGINT)
        return attend(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(StepsAttender, "attend", interrupts)
        done = kvlite(*asked)
    made = json.loads(done.out)
    assert done.code == 130
    assert {each["finish_reason"] for each in made} == {"interrupted"}
    assert all(0 < each["generated_tokens"] < 6 for each in made)
    seen.clear()

    def stopping(self: Context, turn: object, callbacks: object) -> Iterator[None]:
        seen.append(1)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)
        yield from read(self, turn, callbacks)  # type: ignore[arg-type]

    monkeypatch.setattr(Context, "read_in_slices", stopping)
    done = kvlite(*asked)
    made = json.loads(done.out)
    assert done.code == 130 and made[0]["finish_reason"] == "interrupted"
    assert [each.get("error") for each in made[1:]] == ["stopped before it was answered"] * 2


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["a.txt", "What?"], 1),
        (["a.txt"], 1),
        (["a.txt", "b.md", "Where do these disagree?"], 2),
        (["a.txt", "one two", "three four"], 1),
        (["a.txt", "Is it 3/4?", "Explain TCP/IP", "v2.0?"], 1),
        (["a.txt", "何时", "这份合同何时到期"], 1),
        (["missing.txt", "one two", "three four"], 1),
        (["a.txt", "missing", "one two"], 2),  # whoever opens it says that it is not there
        (["a.txt", "one two", "b.md"], 3),
    ],
)
def test_files_come_first(
    words: list[str], files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text("something")
    assert sorted_out(words) == (words[:files], words[files:])


def test_what_is_no_question_is_refused(refused: Refused, text: Path) -> None:
    with pytest.raises(SettingError, match="standard input is the document"):
        sorted_out([str(text), "-"])
    with pytest.raises(SettingError, match="is empty"):
        sorted_out([str(text), "", "What is it?"])
    for word in ("b.txt", "docs/b", "~/b c", "C:\\b"):  # misspelt files
        refused(["ask", text, word], "there is no file", word)
        refused(["ask", text, "What is it?", word], "there is no file", word)
    refused(["ask", text, "What is it?", "report", "Why so?"], "there is no file report")
