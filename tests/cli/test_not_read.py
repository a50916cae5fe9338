"""What of a document was not read is noted with the answer about it, once."""

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from kvlite import load
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.runner import Runner
from kvlite.conversation.session import Session
from kvlite.conversation.snapshot import Snapshot
from kvlite.documents import Document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.model.chat_template import all_of, asked_of, question_about
from tests.cli.conftest import Run
from tests.documents.files import raw_word, run

REPORT = Document("1", "4 5 6 " * 20, (), ("2 pictures", "1 embedded object"), ("read as cp850",))
NOTE = "1: read as cp850; 2 pictures and 1 embedded object were not read"


def test_a_note_is_a_sentence() -> None:
    assert Document("a", "x", ()).note == ""
    assert Document("a", "x", (), ("1 picture",)).note == "a: 1 picture was not read"
    assert Document("a", "x", (), ("2 pictures",)).note == "a: 2 pictures were not read"
    three = ("1 picture", "1 chart", "3 footnotes")
    assert Document("a", "x", (), three).note == (
        "a: 1 picture, 1 chart and 3 footnotes were not read"
    )
    assert Document("a", "x", (), (), ("read as cp850",)).note == "a: read as cp850"
    assert Document("a", "x", (), ("1 chart",), ("read as cp850", "2 NULs left out")).note == (
        "a: read as cp850; 2 NULs left out; 1 chart was not read"
    )


@pytest.fixture
def runner(model: Path) -> Runner:
    return load(str(model), max_new_tokens=3)


def begun(runner: Runner) -> Conversation:
    talk = runner.conversation()
    talk.documents = (REPORT, Document("2", "7 8 9", ()))
    return talk


def notes(talk: Conversation, message: str, told: list[str]) -> tuple[str, ...]:
    *_, last = talk.stream(message, callbacks=Callbacks(notify=told.append))
    return last.metrics.notes


@pytest.mark.cases(1)
@pytest.mark.parametrize("ahead", [False, True])
def test_it_is_noted_once(runner: Runner, ahead: bool, tmp_path: Path) -> None:
    talk, told = begun(runner), list[str]()
    question = question_about(talk.documents, "10 11")
    if ahead:
        assert talk.read_ahead(all_of(talk.documents))
    talk.save(tmp_path / "talk.kv")
    assert notes(talk, question, told) == (NOTE,) and told == [NOTE]
    assert notes(talk, asked_of(talk.documents, "12"), told) == () and told == [NOTE]
    with Snapshot(tmp_path / "talk.kv") as saved:
        assert saved.documents() == talk.documents


@pytest.mark.long
def test_a_file_that_says_nothing_of_it_is_opened(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = begun(runner)
    monkeypatch.setattr(
        "kvlite.conversation.snapshot.asdict",
        lambda each: {name: value for name, value in asdict(each).items() if name != "not_read"},
    )
    talk.save(tmp_path / "talk.kv")
    with Snapshot(tmp_path / "talk.kv") as saved:
        assert [each.not_read for each in saved.documents()] == [(), ()]


def test_a_chat_notes_it(runner: Runner) -> None:
    session = Session(runner, runner.settings)

    def nothing(*_: object) -> None:
        pass

    session.read([REPORT], NO_CALLBACKS)
    told = list[str]()
    *_, last = session.say("10 11")(Callbacks(notify=told.append))
    assert last.metrics.notes == (NOTE,) and told == [NOTE]


@pytest.mark.long
def test_ask_and_read_say_it(
    kvlite: Run,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))
    drawn = "<w:r><w:drawing><pic:pic/></w:drawing></w:r>"
    path = tmp_path / "report.docx"
    path.write_bytes(raw_word(f"<w:p>{run('The cat sat.')}{drawn}</w:p>"))
    flags = ("--model", model, "--max-tokens", "3")
    note = "report.docx: 1 picture was not read"
    asked = kvlite("ask", path, "Who?", *flags)
    assert (asked.code, asked.err.count(note)) == (0, 1)
    assert kvlite("ask", path, "Who?", *flags, "--json", "-q").json()["notes"] == [note]
    made = kvlite("read", path, *flags)
    assert (made.code, made.err.count(note)) == (0, 1)
    opened = kvlite("ask", path, "Who?", *flags)
    assert opened.err.count(note) == 1 and "Opened" in opened.err
    (file,) = (tmp_path / "data").rglob("*.kv")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\nAnd then?\n"))
    lines = kvlite("ask", file, *flags[2:], "--json", "-q").out.splitlines()
    assert [json.loads(line)["notes"] for line in lines] == [[note], []]
