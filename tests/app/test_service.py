"""Conversations in the service: what is kept of them, whatever comes in between."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlite.chat.session import Session
from kvlite.errors import SettingError, SnapshotError, Stopped
from kvlite.settings import Settings
from kvlite_app.record import Record
from kvlite_app.service import Service
from kvlite_app.shelf import Shelf

A, B = "a" * 32, "b" * 32


@pytest.fixture
def given(tiny_folder: Path) -> Settings:
    return Settings(model=str(tiny_folder), max_new_tokens=4)


@pytest.fixture
def service(given: Settings, tmp_path: Path) -> Iterator[Service]:
    service = Service(given, tmp_path)
    yield service
    service.close()


def kept(service: Service, id: str = A) -> Record:
    return service.shelf("").record(id)


def texts(record: Record) -> list[str]:
    return [each.text for each in record.said if each.role == "user"]


def blocked(service: Service) -> threading.Event:
    """The engine does nothing until this is set."""
    go = threading.Event()
    work = service.engine.submit(lambda work: go.wait(60), "")
    while service.engine.current is not work:
        time.sleep(0.01)
    return go


def stops(*_: Any, **__: Any) -> Any:
    """In the place of what answers: someone stops it while it reads."""

    def begin(*_: Any) -> Iterator[Any]:
        raise Stopped
        yield

    return begin


def test_a_message_that_was_not_answered_is_the_draft(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.say("", A, "One.", []).wait()
    assert kept(service).draft == ""
    with monkeypatch.context() as patch:
        patch.setattr(Session, "say", stops)
        with pytest.raises(Stopped):
            service.say("", A, "Two.", []).wait()
    assert kept(service).draft == "Two."
    service.undo("", A).wait()
    service.say("", A, "Three.", []).wait()
    assert (texts(kept(service)), kept(service).draft) == (["Three."], "")


def test_words_that_a_message_was_changed_to_are_not_lost(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.say("", A, "One.", []).wait()
    with monkeypatch.context() as patch:
        patch.setattr(Session, "edit", stops)
        with pytest.raises(Stopped):
            service.edit("", A, 1, "Another.").wait()
    assert kept(service).draft == "Another."
    with pytest.raises(SettingError, match="empty"):
        service.edit("", A, 1, " \n")
    service.edit("", A, 1, "Another.").wait()
    assert (texts(kept(service)), kept(service).draft) == (["Another."], "")


def test_a_message_that_could_not_be_answered_again_is_the_draft(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.say("", A, "One.", []).wait()

    def leaves(session: Session) -> Any:
        def begin(*_: Any) -> Iterator[Any]:
            session.talk.ways.leave(0, session.talk.settings)
            raise Stopped
            yield

        return begin

    monkeypatch.setattr(Session, "regenerate", leaves)
    with pytest.raises(Stopped):
        service.regenerate("", A).wait()
    assert (texts(kept(service)), kept(service).draft) == ([], "One.")


def test_a_name_that_was_given_stays_given(service: Service) -> None:
    service.say("", A, "One.", []).wait()
    service.shelf("").rename(A, "Mine")
    service.say("", A, "Two.", []).wait()
    assert (kept(service).name, texts(kept(service))) == ("Mine", ["One.", "Two."])
    go = blocked(service)
    work = service.say("", A, "Three.", [])
    service.shelf("").rename(A, "Still mine")
    go.set()
    work.wait()
    assert kept(service).name == "Still mine"


def test_a_record_is_changed_by_one_at_a_time(tmp_path: Path) -> None:
    shelf = Shelf("", tmp_path)

    def add(name: str) -> None:
        for number in range(20):
            with shelf.changing(A) as record:
                record.waiting.append(f"{name}{number}")

    others = [threading.Thread(target=add, args=[name]) for name in "abc"]
    for each in others:
        each.start()
    for each in others:
        each.join()
    assert len(shelf.record(A).waiting) == 60


def test_two_messages_at_once_are_not_both_taken(service: Service) -> None:
    service.say("", A, "One.", []).wait()
    go, taken, refused = blocked(service), list[Any](), list[Any]()
    both = threading.Barrier(8)

    def say(text: str) -> None:
        both.wait()
        try:
            taken.append(service.say("", A, text, []))
        except SettingError as error:
            refused.append(error)

    others = [threading.Thread(target=say, args=[f"{number}."]) for number in range(8)]
    for each in others:
        each.start()
    for each in others:
        each.join()
    go.set()
    assert (len(taken), len(refused)) == (1, 7)
    taken[0].wait()


def test_work_that_has_ended_is_forgotten(service: Service) -> None:
    for number in range(5):
        service.say("", f"{number:032x}", "One.", []).wait()
    assert len(service._works) == 1


def test_what_is_in_memory_is_set_aside_when_it_ends(given: Settings, tmp_path: Path) -> None:
    service = Service(given, tmp_path)
    service.say("", A, "One.", []).wait()
    service.close()
    assert service.shelf("").whole(A).is_file()
    after = Service(given, tmp_path)
    after.say("", A, "Two.", []).wait()
    assert texts(kept(after)) == ["One.", "Two."]
    assert not after.shelf("").whole(A).is_file()
    after.close()


def test_what_was_answered_is_there_even_if_the_program_ended_before_it_was_shown(
    given: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(given, tmp_path)
    service.say("", A, "One.", []).wait()

    def full(shelf: Shelf, record: Record) -> None:
        raise OSError("no room")

    go, work = blocked(service), service.say("", A, "Two.", [])
    monkeypatch.setattr(Shelf, "save", full)
    go.set()
    with pytest.raises(OSError, match="no room"):
        work.wait()
    monkeypatch.undo()
    service.engine.close(seconds=60)
    after = Service(given, tmp_path)
    after.say("", A, "Three.", []).wait()
    assert texts(kept(after)) == ["One.", "Two.", "Three."]
    after.close()


def test_a_conversation_whose_settings_are_unknown_goes_on_without_them(
    given: Settings, tmp_path: Path
) -> None:
    service = Service(given, tmp_path)
    service.say("", A, "One.", []).wait()
    service.say("", B, "One.", []).wait()  # A is not in memory any more
    with service.shelf("").changing(A) as record:
        record.changed = {"magic": 3}
    work = service.say("", A, "Two.", [])
    work.wait()
    assert any("magic" in note for note in work.shown.notes)
    assert texts(kept(service)) == ["One.", "Two."]
    service.change("", A, {"max_new_tokens": 2}).wait()
    assert kept(service).changed == {"max_new_tokens": 2}
    service.close()


def test_what_was_said_is_not_replaced_where_the_engine_has_lost_it(service: Service) -> None:
    service.say("", A, "One.", []).wait()
    service.say("", B, "One.", []).wait()
    service.shelf("").whole(A).unlink()
    service.shelf("").light(A).unlink()
    with pytest.raises(SnapshotError, match="is gone"):
        service.say("", A, "Two.", []).wait()
    assert texts(kept(service)) == ["One."]


def test_a_model_that_cannot_be_loaded_leaves_the_former_one_to_be_had(
    service: Service, given: Settings, tmp_path: Path
) -> None:
    service.say("", A, "One.", []).wait()
    work = service.load(given.replace({"model": str(tmp_path / "nothing")}))
    with pytest.raises(Exception, match="nothing"):
        work.wait()
    service.say("", A, "Two.", []).wait()
    assert texts(kept(service)) == ["One.", "Two."]


def test_what_the_model_is_told_first_changes_only_before_anything_is_said(
    service: Service,
) -> None:
    service.change("", A, {"system": "You are a pirate."}).wait()
    assert kept(service).changed == {"system": "You are a pirate."}
    service.say("", A, "One.", []).wait()
    with pytest.raises(SettingError, match="begin a new conversation"):
        service.change("", A, {"system": "You are a poet."}).wait()
    assert kept(service).changed == {"system": "You are a pirate."}


def test_what_is_deleted_is_gone_whatever_was_being_done(service: Service) -> None:
    service.say("", A, "One.", []).wait()
    go = blocked(service)
    work = service.say("", A, "Two.", [])
    gone = service.forget("", A)
    go.set()
    gone.wait()
    with pytest.raises(Stopped):
        work.wait()
    assert not service.shelf("").place(A).exists()
    assert service.open is None
