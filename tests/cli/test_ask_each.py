"""`kvlite ask` with several questions: the document is read once, answers come together."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlite.cli.ask_each import sorted_out
from kvlite.engine.rows_attender import StepsAttender
from kvlite.errors import KvliteError, SettingError
from tests.cli.conftest import Refused, Run

QUESTIONS = ("Who sat?", "Who lay by the door?", "Where?")
FLAGS = ("--max-tokens", "6", "--budget", "64")


def test_each_answer_is_that_of_one_question(kvlite: Run, model: Path, text: Path) -> None:
    done = kvlite("ask", text, *QUESTIONS, "--model", model, *FLAGS, "--json")
    made = json.loads(done.out)
    assert done.code == 0 and [each["question"] for each in made] == [*QUESTIONS]
    assert [each["together"] for each in made] == [3, 3, 3]
    for question, each in zip(QUESTIONS, made, strict=True):
        one = kvlite("ask", text, question, "--model", model, *FLAGS, "--json").json()
        assert one["answer"] == each["answer"]
        assert each["prompt_tokens"] < 40 < one["prompt_tokens"]
        assert each["ahead_tokens"] + each["prompt_tokens"] == one["prompt_tokens"]
        assert each["ahead_s"] == made[0]["ahead_s"] > 0 == one["ahead_tokens"]


def test_as_text_in_their_order(kvlite: Run, model: Path, text: Path) -> None:
    done = kvlite("ask", text, *QUESTIONS, "--model", model, *FLAGS)
    lines = done.out.splitlines()
    starts = [line for line in lines if line[:3] in ("1. ", "2. ", "3. ")]
    assert starts == ["1. Who sat?", "2. Who lay by the door?", "3. Where?"]
    assert done.err.count("stopped at the length limit") == 3
    assert len(re.findall(r"read \d+ tokens in \d+\.\d s, then \d+ ·", done.err)) == 3


def test_one_that_does_not_fit_leaves_the_others(kvlite: Run, model: Path, text: Path) -> None:
    asked = ("Who?", "why " * 400, "Where?")
    done = kvlite("ask", text, *asked, "--model", model, *FLAGS, "--json")
    made = json.loads(done.out)
    assert done.code == 2 and [sorted({"answer", "error"} & {*each}) for each in made] == [
        ["answer"],
        ["error"],
        ["answer"],
    ]
    assert "do not fit this model" in made[1]["error"]
    done = kvlite("ask", text, *asked, "--model", model, *FLAGS)
    assert done.code == 2 and done.err.count("kvlite: ") == 1


def test_an_interrupt_keeps_what_is_finished(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second step of two answers."""
    attend, seen = StepsAttender.attend, list[int]()

    def interrupts(self: StepsAttender, *args: object) -> object:
        seen.append(len(self.steps))
        if len(seen) == 6:  # the model has four layers
            import signal

            signal.raise_signal(signal.SIGINT)
        return attend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(StepsAttender, "attend", interrupts)
    done = kvlite("ask", text, *QUESTIONS, "--model", model, *FLAGS, "--json")
    made = json.loads(done.out)
    assert done.code == 130
    assert {each["finish_reason"] for each in made} == {"interrupted"}
    assert all(0 < each["generated_tokens"] < 6 for each in made)


@pytest.mark.long
def test_reading_that_is_stopped_answers_nothing_more(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the second question is read."""
    from kvlite.conversation.context import Context

    read, count = Context.read_in_slices, list[int]()

    def stopping(self: Context, turn: object, callbacks: object) -> Iterator[None]:
        count.append(1)
        if len(count) == 3:
            import signal

            signal.raise_signal(signal.SIGINT)
        yield from read(self, turn, callbacks)  # type: ignore[arg-type]

    monkeypatch.setattr(Context, "read_in_slices", stopping)
    done = kvlite("ask", text, *QUESTIONS, "--model", model, *FLAGS, "--json")
    made = json.loads(done.out)
    assert done.code == 130 and made[0]["finish_reason"] == "interrupted"
    assert [each.get("error") for each in made[1:]] == ["stopped before it was answered"] * 2


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["a.txt", "What?"], 1),
        (["a.txt", "Summarize"], 1),
        (["a.txt"], 1),
        (["a.txt", "b.md"], 2),
        (["a.txt", "b.md", "Where do these disagree?"], 2),
        (["a.txt", "one two", "three four"], 1),
        (["a.txt", "Is it 3/4?", "Explain TCP/IP", "v2.0?"], 1),
        (["a.txt", "何时", "这份合同何时到期"], 1),
        (["a.txt", "-"], 2),
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
    if "-" in words:
        with pytest.raises(SettingError, match="standard input is the document"):
            sorted_out(words)
    else:
        assert sorted_out(words) == (words[:files], words[files:])


@pytest.mark.parametrize("word", ["b.txt", "./b", "docs/b", "~/b c", "report.pdf", "C:\\b", "/b"])
def test_a_misspelt_file_is_no_question(refused: Refused, text: Path, word: str) -> None:
    refused(["ask", text, word], "there is no file", word)
    refused(["ask", text, "What is it?", word], "there is no file", word)
    refused(["ask", text, "What is it?", "report", "Why so?"], "there is no file report")


def test_errors_are_of_one_kind() -> None:
    with pytest.raises(KvliteError, match="is empty"):
        sorted_out([__file__, "", "What is it?"])
