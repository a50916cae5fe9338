"""What is refused, left or stuck: nothing is left of it, and nobody waits for it."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.conversation.session import Session
from kvlite.errors import ContextError, DocumentError, SettingError, Stopped
from kvlite_app.engine.service import Service
from kvlite_app.words import spoken
from tests.app.conftest import upload, waited
from tests.app.test_service import HERONS, A, B, blocked, kept, stops, texts


@pytest.mark.long
def test_what_cannot_fit_is_refused_before_it_waits_or_is_kept(service: Service) -> None:
    service.say("", A, "One.").wait()
    go = blocked(service)
    for text in ("word " * 4_000_000, "word " * 3_000):
        with pytest.raises(ContextError):
            service.say("", B, text)
        with pytest.raises(ContextError):
            service.edit("", A, 1, text)
        with pytest.raises(ContextError):
            service.change("", B, {"system": text})
    go.set()
    assert kept(service).draft == ""
    assert not service.store("").has(B)  # nor is there a conversation of it
    assert service.under_way("", B) is None


def test_before_there_is_a_model_a_message_is_bounded(given: Settings, tmp_path: Path) -> None:
    service = Service(given, tmp_path)
    with pytest.raises(ContextError, match="can fit"):
        service.say("", A, "a" * 5_000_000)
    assert not service.store("").has(A)
    service.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schema": json.dumps({"type": "integer", "multipleOf": 9_999_991})}, "takes more than"),
        ({"schema": "{"}, "cannot be followed"),
        ({"schema": "{" * 2_000_000}, "at most"),
        ({"temperature": float("inf")}, "temperature"),
    ],
)
def test_settings_of_others_are_refused_in_the_words_of_the_page(
    service: Service, settings: dict[str, Any], words: str
) -> None:
    service.say("", A, "One.").wait()
    with pytest.raises(SettingError) as error:
        service.change("", A, settings).wait()
    assert words in str(error.value)
    said = spoken(str(error.value))
    assert "--" not in said and "\n" not in said and len(said) < 400


@pytest.mark.long
def test_what_was_left_leaves_no_conversation(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = blocked(service)
    left = service.say("", B, "Are you there?")
    assert service.store("").has(B)
    left.abandon()
    go.set()
    with pytest.raises(Stopped):
        left.wait()
    assert service.store("").records() == []
    assert [each.name for each in service.store("").folder.glob("*")] == ["locks"]
    service.say("", A, "One.").wait()
    with monkeypatch.context() as patch:
        patch.setattr(Session, "say", stops)
        work = service.say("", A, "Two.")
        work.abandon()
        with pytest.raises(Stopped):
            work.wait()
    assert texts(kept(service)) == ["One."]  # what was said stays


def test_a_first_message_that_is_refused_stays_with_its_reason(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looked elsewhere finds it in the list; so it does where the model refuses it."""
    with pytest.raises(DocumentError):
        service.say("", A, "What is in it?", [upload(service, "a.pdf", b"nothing")]).wait()
    monkeypatch.setattr(Session, "say", refuses)
    with pytest.raises(ContextError):
        service.say("", B, "And here?").wait()
    for id, asked, why in ((A, "What is in it?", "a.pdf"), (B, "And here?", "too long")):
        record, work = kept(service, id), service.work_for("", id)
        assert work is not None and why in work.shown.error
        assert record.draft == asked == record.title and not record.said
    assert {each.id for each in service.store("").records()} == {A, B}
    monkeypatch.undo()
    service.say("", B, "And here?").wait()
    assert texts(kept(service, B)) == ["And here?"] and kept(service, B).draft == ""


def refuses(*_: Any) -> Any:
    raise ContextError("this is too long")


def test_uploads_go_with_their_conversation(service: Service) -> None:
    go = blocked(service)
    path = upload(service, "a.txt", HERONS)
    work = service.say("", A, "What is in it?", [path])
    waited(lambda: work.shown.before == 1)
    assert Path(path).exists()
    service.forget("", A)
    assert not Path(path).exists()
    go.set()


def test_another_s_upload_is_not_read(service: Service) -> None:
    path = upload(service, "a.txt", HERONS, owner="ann")
    with pytest.raises(DocumentError, match="no file that was uploaded"):
        service.say("ben", A, "What is in it?", [path])
    assert Path(path).exists()


def test_documents_are_read_in_another_process_two_at_a_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = list[str](), threading.Event()

    def slow(_: Any, path: str, *_given: Any, **given: Any) -> Any:
        begun.append(path)
        assert given["memory"] == 3 << 30
        while not go.wait(0.01):
            if given["cancel"].is_set():
                raise Stopped
        raise MemoryError

    monkeypatch.setattr("kvlite.documents.reading.run_in_child", slow)
    ids = [f"{number:032x}" for number in range(3)]
    works = [service.say("", id, "", [upload(service, f"{id}.txt", HERONS)]) for id in ids]
    waited(lambda: len(begun) == 2)
    third = next(work for work, id in zip(works, ids, strict=True) if id not in "".join(begun))
    third.cancel.set()
    with pytest.raises(Stopped):
        third.wait()
    go.set()
    others = [work for work in works if work is not third]
    for work in others:
        with pytest.raises(DocumentError, match="takes more memory to open"):
            work.wait()


def test_a_user_s_conversations_that_wait_are_not_too_many(service: Service) -> None:
    go = blocked(service)
    for number in range(16):
        service.say("ann", f"{number:032x}", "Hello")
    with pytest.raises(SettingError, match="16 of your conversations wait"):
        service.say("ann", A, "Hello")
    service.say("ben", A, "Hello").cancel.set()
    go.set()


@pytest.mark.long
@pytest.mark.parametrize("loads", [True, False])
def test_what_never_ends_keeps_nobody_from_closing(
    given: Settings, tmp_path: Path, loads: bool
) -> None:
    service, go = Service(given, tmp_path), threading.Event()
    service.say("", A, "One.").wait()
    public = "the model is being loaded" if loads else ""
    stuck = service.engine.submit(lambda work: go.wait(600), "", public=public)
    waited(lambda: service.engine.current is stuck)
    told = service.close(patience=0.1)
    assert told == (
        "" if loads else "What was being done did not end in time; an answer may be lost."
    )
    go.set()


def test_of_a_document_that_is_too_long_the_relevant_parts_are_read(
    service: Service, tmp_path: Path
) -> None:
    """The file and the question stay; so they do where it was read ahead, as it cannot be."""
    text = "The sea was calm.\n\n" * 4_000 + "Herons wait.\n\n" + "The sea was calm.\n\n" * 4_000
    file = upload(service, "a.txt", text.encode())
    with pytest.raises(ContextError):
        service.say("", A, "", [file], ahead=True).wait()
    for _ in range(2):
        with pytest.raises(ContextError):
            service.say("", A, "What do herons do?", [file]).wait()
    go = blocked(service)
    service.say("", B, "", [file], ahead=True)
    sent = service.say("", B, "What do herons do?", [file])
    go.set()
    with pytest.raises(ContextError):
        sent.wait()
    assert sent.request.files == [file]  # which the box has again
    assert Path(file).is_file()
    service.say("", A, "What do herons do?", [file], parts=True).wait()
    (document,) = service.model_host.holds(service.store(""), A).talk.documents  # type: ignore[union-attr]
    assert "Herons wait." in document.text and "left out here]" in document.text
    (account,) = service.store("").place(A).glob("answers/*.json")
    told = json.loads(account.read_text())["told"]
    assert any("those that a text search found for this question" in each for each in told)
    assert not Path(file).exists() and texts(kept(service)) == ["What do herons do?"]


def test_what_was_too_long_is_read_once_another_model_takes_it(
    service: Service, talker: Path
) -> None:
    file = upload(service, "a.txt", b"The sea was calm. " * 2_000)
    with pytest.raises(ContextError):
        service.say("", A, "", [file], ahead=True).wait()
    service.load(service.host.settings.replace({"model": str(talker)})).wait()
    service.say("", A, "What was calm?", [file]).wait()
    assert texts(kept(service)) == ["What was calm?"]
