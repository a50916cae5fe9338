"""What one front end keeps, the others list and go on with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlite.config.settings import Settings
from kvlite.conversation.entries import entries, matching
from kvlite.conversation.library import Library
from kvlite.conversation.record import SERVER, StoredMessage
from kvlite.conversation.runner import Runner, open_runner
from kvlite.conversation.session import Session, saved_as
from kvlite.documents import Document
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.errors import SettingError
from kvlite.model.chat_template import all_of
from kvlite.server.conversations import Conversations
from kvlite_app.engine.service import Service
from kvlite_app.views.history import history
from kvlite_app.views.listing import listing_html

A = "a" * 32
REPORT = Document("herons.txt", "Herons live by the water. " * 20, ())


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path))
    return Library()


@pytest.fixture
def settings(tiny_folder: Path) -> Settings:
    return Settings(model=str(tiny_folder), budget="64", max_new_tokens=4)


@pytest.fixture
def runner(settings: Settings) -> Runner:
    return open_runner(settings)


@pytest.fixture
def app(library: Library, settings: Settings) -> Iterator[Service]:
    service = Service(settings)
    service.load(settings).wait()
    yield service
    service.close()


def titles(service: Service) -> list[str]:
    return [each.title for each in service.store("").records()]


def said(session: Session, text: str) -> None:
    list(session.say(text)(NO_CALLBACKS))


def loaded(session: Session, name: str) -> str:
    return session.load(*saved_as(name), None, NO_CALLBACKS)


def read_document(library: Library, runner: Runner) -> None:
    from kvlite.conversation.entries import add_document

    talk = runner.conversation()
    talk.documents = (REPORT,)
    assert talk.read_ahead(all_of([REPORT]))
    add_document(library, talk)


def test_the_page_goes_on_with_what_the_terminal_said(
    app: Service, library: Library, runner: Runner, settings: Settings
) -> None:
    session = Session(runner, settings)
    said(session, "One?")
    session.save("trip", None)
    assert titles(app) == ["trip"]
    (record,) = library.records()
    with pytest.raises(SettingError, match='"trip" is open in another kvlite'):
        app.say("", record.id, "Two?")
    assert library.record(record.id).draft == ""
    session.leave_library()
    app.say("", record.id, "Two?").wait()
    assert [each.text for each in library.record(record.id).said[::2]] == ["One?", "Two?"]
    assert '"trip" is open in another kvlite' in loaded(session, "trip")
    assert [each.text for each in session.messages] == ["One?", "Two?"]  # it is read
    app.close()
    assert loaded(session, "trip") == ""
    said(session, "Three?")
    session.save("trip", None)
    assert len(library.record(record.id).said) == 6
    session.leave_library()


def test_the_terminal_goes_on_with_what_the_page_said(
    app: Service, library: Library, runner: Runner, settings: Settings
) -> None:
    app.say("", A, "What is a heron?").wait()
    app.close()
    (entry,) = entries(library)
    assert (entry.name, entry.flaw) == ("What is a heron?", "") and entry.about is not None
    session = Session(runner, settings)
    assert loaded(session, "What is a heron?") == loaded(session, A[:8]) == ""
    said(session, "And an egret?")
    session.save("What is a heron?", None)
    assert len(library.record(A).said) == 4
    session.leave_library()


def test_a_document_stays_when_the_page_talks_about_it(
    app: Service, library: Library, runner: Runner, settings: Settings
) -> None:
    read_document(library, runner)
    (document,) = library.records()
    html = listing_html(library.records())
    assert "herons.txt" in html and "<small>document</small>" in html
    work = app.say("", document.id, "Where do they live?")
    work.wait()
    assert work.failure is None
    found = {each.title: each for each in library.records()}
    assert set(found) == {"herons.txt", "Where do they live?"}
    talk = found["Where do they live?"]
    assert talk.id == document.id and not talk.is_document
    assert talk.said[0].documents == ("herons.txt",) and talk.waiting == []
    entry = matching(library, runner.model, [REPORT], settings)
    assert entry is not None and entry.id == found["herons.txt"].id != talk.id
    app.say("", talk.id, "And when?").wait()
    assert len(library.records()) == 2


def test_the_page_goes_on_with_what_a_program_said(
    app: Service, library: Library, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.server.kept.SHORT", 10)
    served = Conversations(runner, 1 << 30, 1 << 30, library)
    ids = runner.model.tokenizer.encode("Where do herons live? " * 20)
    list(served.answer(ids, {}, NO_CALLBACKS, said=[StoredMessage("user", "Where?")]))
    assert served.store_idle()
    (record,) = library.records()
    assert (record.title, record.made_by, len(record.said)) == ("Where?", SERVER, 2)
    assert "<small>program</small>" in listing_html([record])
    shown = history(record, library)
    assert {*shown.numbers} == {0}  # nobody can edit what a program said
    app.say("", record.id, "And why?").wait()
    now = library.record(record.id)
    assert [each.text for each in now.said[::2]] == ["Where?", "And why?"] and now.made_by == ""
    assert history(now, library).numbers[-1] == 1
    read = Session(runner, app.host.settings)
    app.close()
    assert loaded(read, "Where?") == "" and read.talk.token_ids[: len(ids)] == ids
    read.leave_library()


def served_one(library: Library, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Conversations:
    """A server that has answered a program, and put that into the library."""
    monkeypatch.setattr("kvlite.server.kept.SHORT", 10)
    served = Conversations(runner, 1 << 30, 1 << 30, library)
    ids = runner.model.tokenizer.encode("Where do herons live? " * 20)
    list(served.answer(ids, {}, NO_CALLBACKS, said=[StoredMessage("user", "Where?")]))
    assert served.store_idle()
    return served


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_server_leaves_what_the_page_went_on_with(
    app: Service,
    library: Library,
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_memory: bool,
) -> None:
    served = served_one(library, runner, monkeypatch)
    (record,) = library.records()
    if not in_memory:
        served.set_aside()
    app.say("", record.id, "And why?").wait()
    app.close()
    if not in_memory:
        library.whole(record.id).unlink()  # as it is while the page has it open
    ids = [*served.kept[0].ids, 5, 6, 7]
    list(served.answer(ids, {}, NO_CALLBACKS, said=[StoredMessage("user", "Else?")]))
    served.store_idle()
    served.files.most = 0
    served.set_aside()
    (now,) = library.records()
    assert (now.id, now.made_by) == (record.id, "")
    assert [each.text for each in now.said[::2]] == ["Where?", "And why?"]


def test_what_is_saved_of_a_programs_conversation_is_the_users(
    library: Library, runner: Runner, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_one(library, runner, monkeypatch).set_aside()
    session = Session(runner, settings)
    loaded(session, "Where?")
    said(session, "Why?")
    session.save("Where?", None)
    (record,) = library.records()
    assert record.made_by == ""
    assert [each.text for each in record.said[::2]] == ["Where?", "Why?"]
    other = Session(runner, settings)
    other.begin(max_new_tokens=3)
    said(other, "Else?")
    with pytest.raises(SettingError, match="is open in another kvlite"):
        other.save("Where? --force", None)
    session.leave_library()
    library.served(record.id).write_text("what a server answered")
    other.save("Where? --force", None)
    (now,) = library.records()
    assert (now.id, now.made_by, now.earlier, now.began["max_new_tokens"]) == (record.id, "", 0, 3)
    assert [each.text for each in now.said[::2]] == ["Else?"]
    assert not library.served(now.id).exists()
    other.leave_library()
