"""Conversations in the service: what is kept of them, whatever comes in between."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.conversation.library import Library
from kvlite.conversation.record import Record
from kvlite.errors import DocumentError, SettingError, SnapshotError, Stopped
from kvlite_app.engine.read_ahead import keep_up
from kvlite_app.engine.service import Service
from tests.app.conftest import upload, waited

A, B = "a" * 32, "b" * 32
HERONS = b"Herons live by the water."


def kept(service: Service, id: str = A) -> Record:
    return service.store("").record(id)


def texts(record: Record) -> list[str]:
    return [each.text for each in record.said if each.role == "user"]


def blocked(service: Service) -> threading.Event:
    """The engine does nothing until this is set."""
    go = threading.Event()
    work = service.engine.submit(lambda work: go.wait(60), "")
    waited(lambda: service.engine.current is work)
    return go


def stops(*_: Any, **__: Any) -> Any:
    """In the place of what answers: someone stops it while it reads."""

    def begin(*_: Any) -> Iterator[Any]:
        raise Stopped
        yield

    return begin


def test_a_record_is_changed_by_one_at_a_time(tmp_path: Path) -> None:
    store = Library("", tmp_path)

    def add(name: str) -> None:
        for number in range(20):
            with store.changing(A) as record:
                record.waiting.append(f"{name}{number}")

    others = [threading.Thread(target=add, args=[name]) for name in "abc"]
    for each in others:
        each.start()
    for each in others:
        each.join()
    assert len(store.record(A).waiting) == 60


@pytest.mark.long
def test_what_was_answered_is_there_even_if_the_program_ended_before_it_was_shown(
    given: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(given, tmp_path)
    service.say("", A, "One.").wait()

    def full(store: Library, record: Record) -> None:
        raise OSError("no room")

    go, work = blocked(service), service.say("", A, "Two.")
    monkeypatch.setattr(Library, "save", full)
    go.set()
    with pytest.raises(SnapshotError, match=r"in memory only.*no room"):
        work.wait()
    monkeypatch.undo()
    service.engine.close(seconds=60)
    service.model_host.drop()  # as a program's end does, with its lock
    after = Service(given, tmp_path)
    after.say("", A, "Three.").wait()
    assert texts(kept(after)) == ["One.", "Two.", "Three."]
    after.close()


def no_room(*_: Any) -> None:
    raise OSError("no room")


@pytest.mark.long
def test_an_answer_that_cannot_be_written_is_shown_and_kept_with_the_next(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.say("", A, "One.").wait()
    go, work = blocked(service), service.say("", A, "Two.")
    with monkeypatch.context() as patch:
        patch.setattr(Library, "save", no_room)
        go.set()
        with pytest.raises(SnapshotError, match=r"in memory only.*no room"):
            work.wait()
        shown = service.record("", A)
        assert (texts(shown), shown.draft) == (["One.", "Two."], "")
        assert texts(service.shown("", A)) == ["One.", "Two."]
        assert texts(kept(service)) == ["One."]
        with pytest.raises(SnapshotError, match="not sent"):
            service.say("", A, "Three.")
        other = service.engine.submit(service.model_host.set_aside, "")
        with pytest.raises(SnapshotError, match="in memory only"):  # nor is it given up for others
            other.wait()
    service.say("", A, "Three.").wait()
    assert texts(kept(service)) == ["One.", "Two.", "Three."]


def test_what_cannot_be_kept_is_told_at_the_end(
    given: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(given, tmp_path)
    go, work = blocked(service), service.say("", A, "One.")
    monkeypatch.setattr(Library, "save", no_room)
    go.set()
    with pytest.raises(SnapshotError):
        work.wait()
    assert "answer is lost, as it cannot be written: no room." in service.close()


@pytest.mark.long
def test_files_are_opened_while_others_are_answered(service: Service) -> None:
    good, bad = upload(service, "a.txt", HERONS), upload(service, "b.pdf", b"nothing")
    go, files = blocked(service), [good, bad]
    with pytest.raises(DocumentError, match=r"b\.pdf"):
        service.say("", A, "What is in them?", files).wait()
    done = service.work_for("", A)
    assert done is not None and done.request.files == files
    assert (Path(good).is_file(), Path(bad).exists()) == (True, False)  # what can be sent again
    assert done.request.text == "What is in them?"
    work = service.say("", A, "What is in it?", files[:1])
    go.set()
    work.wait()
    assert kept(service).said[0].documents == ("a.txt",)
    (account,) = service.store("").place(A).glob("answers/*.json")
    assert any("tokens were read in" in each for each in json.loads(account.read_text())["told"])
    assert work.request.files == []
    assert not Path(good).exists()


@pytest.mark.long
def test_a_document_is_read_once_while_its_question_is_typed(service: Service) -> None:
    """Whether its reading has ended by then or not, the answer is that of both sent together."""
    service.say("", B, "What is in it?", [upload(service, "a.txt", HERONS)]).wait()
    expected = [(each.text, each.documents) for each in kept(service, B).said]
    for id, waits in (("c" * 32, True), ("d" * 32, False)):
        file, go = upload(service, "a.txt", HERONS), blocked(service)
        ahead = keep_up(service, "", id, [file])
        assert ahead is not None and keep_up(service, "", id, [file]) is None
        if waits:
            go.set()
            ahead.wait()
            assert kept(service, id).waiting == ["a.txt"]
        asked = service.say("", id, "What is in it?", [file])
        go.set()
        asked.wait()
        assert [(each.text, each.documents) for each in kept(service, id).said] == expected
        assert not Path(file).exists() and keep_up(service, "", id, []) is None


@pytest.mark.long
def test_what_is_read_ahead_can_be_taken_back_and_stopped(service: Service) -> None:
    service.say("", A, "One.").wait()
    service.say("", A, "What is in it?").wait()
    expected = kept(service).said[-1]
    service.say("", B, "One.").wait()
    files = [upload(service, name, HERONS) for name in ("a.txt", "b.txt")]
    for end in ("read", "reading"):
        go = blocked(service)
        ahead = keep_up(service, "", B, files)
        assert ahead is not None
        if end == "read":
            go.set()
            ahead.wait()
        back = keep_up(service, "", B, files[1:])
        go.set()
        assert back is not None
        back.wait()
        assert kept(service, B).waiting == (["b.txt"] if end == "read" else [])
        gone = keep_up(service, "", B, [])
        assert gone is not None
        gone.wait()
        assert kept(service, B).waiting == []
    service.say("", B, "What is in it?").wait()
    assert kept(service, B).said[-1] == expected
    go = blocked(service)
    ahead, asked = keep_up(service, "", A, files), service.say("", A, "And this?", files)
    asked.cancel.set()
    with pytest.raises(Stopped):
        asked.wait()
    go.set()
    assert ahead is not None and isinstance(ahead.failure, Stopped)
    service.say("", A, "And this?", files).wait()
    assert kept(service).said[-2].documents == ("a.txt", "b.txt")


def test_what_cannot_be_read_ahead_is_said_with_the_message(service: Service) -> None:
    file = upload(service, "b.pdf", b"nothing")
    ahead = keep_up(service, "", A, [file])
    assert ahead is not None
    for work in (lambda: ahead, lambda: service.say("", A, "What?", [file])):
        with pytest.raises(DocumentError, match=r"b\.pdf"):
            work().wait()
    service.reads_ahead = False
    assert keep_up(service, "", B, [upload(service, "a.txt", HERONS)]) is None


@pytest.mark.long
def test_a_conversation_whose_settings_are_unknown_goes_on_without_them(
    given: Settings, tmp_path: Path
) -> None:
    service = Service(given, tmp_path)
    service.say("", A, "One.").wait()
    service.say("", B, "One.").wait()  # A is not in memory any more
    with service.store("").changing(A) as record:
        record.changed = {"magic": 3}
    work = service.say("", A, "Two.")
    work.wait()
    assert any("magic" in note for note in work.shown.notes)
    assert texts(kept(service)) == ["One.", "Two."]
    service.change("", A, {"max_new_tokens": 2}).wait()
    assert kept(service).changed == {"max_new_tokens": 2}
    service.close()


@pytest.mark.long
def test_what_is_deleted_is_gone_whatever_was_being_done(service: Service) -> None:
    service.say("", A, "One.").wait()
    go = blocked(service)
    work = service.say("", A, "Two.")
    gone = service.forget("", A)
    assert not service.store("").place(A).exists()  # whoever else is answered first
    go.set()
    gone.wait()
    with pytest.raises(Stopped):
        work.wait()
    assert not service.store("").place(A).exists()
    assert service.model_host.active is None
    for begin in (lambda: service.say("", A, "Three."), lambda: service.undo("", A)):
        with pytest.raises(SettingError, match="deleted"):
            begin()
