"""The library: what is there, what opens, what has to go."""

import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlite.config.settings import Settings
from kvlite.conversation import entries
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.convert import open_library
from kvlite.conversation.entries import (
    Added,
    add_conversation,
    add_document,
    entry_named,
    limit,
    matching,
    remove,
    set_limit,
)
from kvlite.conversation.library import Library
from kvlite.conversation.message import as_typed
from kvlite.conversation.snapshot import Snapshot
from kvlite.documents import Document
from kvlite.errors import SettingError, SnapshotError
from kvlite.model.chat_template import all_of, question_about
from kvlite.model.load import LoadedModel
from tests.conftest import make_tiny

TEXT = "7 8 9 10 " * 30
REPORT = Document("report.pdf", TEXT, (0, 4))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_tiny("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48).model


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))
    return Library()


def settings(**given: Any) -> Settings:
    usual = {"budget": 40, "max_new_tokens": 3, "recall": "ram", "method": "snapkv"}
    return Settings(**{**usual, **given})


def read(model: LoadedModel, *documents: Document, **given: Any) -> Conversation:
    talk = Conversation(model, settings(**given))
    talk.documents = documents or (REPORT,)
    assert talk.read_ahead(all_of(talk.documents))
    return talk


def asked(model: LoadedModel) -> Conversation:
    talk = read(model)
    list(talk.stream(question_about([REPORT], "11 12")))
    return talk


def keep(library: Library, talk: Conversation, name: str) -> Added:
    """A conversation under a name, as the terminal's chat does."""
    record = library.new()
    record.name = name

    def typed(messages: Any) -> Any:
        asked = [each["content"] for each in messages if each["role"] == "user"]
        return [as_typed(each, talk.documents) for each in asked]

    return add_conversation(library, record, talk, typed, ())


def names(library: Library) -> list[str]:
    return sorted(each.name for each in entries.entries(library))


def test_what_was_read_is_found_again(model: LoadedModel, library: Library) -> None:
    assert entries.entries(library) == []
    assert matching(library, model, [REPORT], settings()) is None
    added = add_document(library, read(model))
    assert added.name == "report.pdf" and added.path.parent.parent == library.folder
    assert added.removed == []
    (entry,) = entries.entries(library)
    assert added.nbytes == entry.nbytes > added.path.stat().st_size
    assert entry.about is not None and entry.about.documents == ("report.pdf",)
    assert entry.record is not None and entry.record.waiting == ["report.pdf"]
    assert not entry.is_conversation and entry.path == added.path.parent
    assert entry.about.tokens > 100 and abs(entry.used - time.time()) < 60
    assert matching(library, model, [REPORT], settings()) == entry


@pytest.mark.parametrize(
    ("read_with", "asked_with", "opens"),
    [
        ({}, {"method": "tova", "budget": 60}, True),
        ({}, {"kv_bits": "4", "temperature": 0.5, "seed": 1, "recall": "disk", "chunk": 7}, True),
        ({}, {"recall": "off"}, False),
        ({"recall_bits": "4"}, {"recall_bits": "4"}, True),
        ({}, {"method": "h2o"}, False),
        ({"method": "h2o"}, {"method": "h2o", "budget": 60}, True),
        ({"method": "full"}, {}, True),
        ({"method": "pyramidinfer", "budget": 400}, {"method": "pyramidinfer"}, False),
        (
            {"method": "pyramidinfer", "budget": 400},
            {"method": "pyramidinfer", "budget": 400, "recall": "auto"},
            True,
        ),
        ({}, {"method": "minference+snapkv"}, False),
    ],
)
def test_it_opens_where_reading_anew_would_give_the_same(
    model: LoadedModel,
    library: Library,
    read_with: dict[str, Any],
    asked_with: dict[str, Any],
    opens: bool,
) -> None:
    add_document(library, read(model, **read_with))
    own = settings(**asked_with)
    found = matching(library, model, [REPORT], own)
    assert (found is not None) == opens
    if found is None:
        return
    assert found.about is not None
    with Snapshot(found.about.path) as saved:
        talk = Conversation(model, own)
        saved.restore(talk)
    anew = Conversation(model, own)
    asked = f"{all_of([REPORT])} 11 12"
    said = []
    for each in (talk, anew):
        (*_, last) = each.stream(asked)
        assert each.context.turn is not None
        said.append((each.messages[-1]["content"], each.token_ids))
        assert (last.metrics.prompt_tokens < 9) == (each is talk)
    assert said[0] == said[1]


def test_other_documents_and_other_models_do_not_match(
    model: LoadedModel, library: Library
) -> None:
    add_document(library, read(model))
    other = make_tiny("llama-rope-linear", num_hidden_layers=2, hidden_size=32).model
    for documents in (
        [Document("report.pdf", TEXT + "11", (0, 4))],
        [Document("other.pdf", TEXT, (0, 4))],
        [REPORT, REPORT],
    ):
        assert matching(library, model, documents, settings()) is None
    assert matching(library, other, [REPORT], settings()) is None
    keep(library, asked(model), "about the report")
    remove(library, "report.pdf")
    assert names(library) == ["about the report"]
    assert matching(library, model, [REPORT], settings()) is None


def test_names(model: LoadedModel, library: Library) -> None:
    changed = Document("report.pdf", TEXT + "11", ())

    def added(*documents: Document, **given: Any) -> str:
        return add_document(library, read(model, *documents, **given)).name

    assert added() == "report.pdf" == added(recall_bits="8")
    assert added(changed) == "report.pdf (2)"
    assert added(REPORT, changed) == "report.pdf and 1 more"
    assert added(Document('../..a/b:"c".txt', TEXT, ())) == '../..a/b:"c".txt'
    assert added(Document(" a\n\u3000b.txt ", TEXT, ())) == "a b.txt"
    assert added(Document("ä b " * 80 + ".txt", TEXT, ())).startswith("ä b ä b")
    assert added(Document("a\udcff.txt", TEXT, ()))
    assert add_document(library, read(model), "mine").name == "mine"
    assert add_document(library, read(model), " my\n own ").name == "my own"
    assert len({each.id for each in entries.entries(library)}) == len(names(library)) == 9
    assert {path.parent for path in library.folder.glob("*/whole.kv")} == {
        each.path for each in entries.entries(library)
    }


def test_one_of_several_of_a_name_is_named_by_its_id(model: LoadedModel, library: Library) -> None:
    talk = asked(model)
    keep(library, talk, "trip")
    keep(library, talk, "trip")
    one, two = entries.entries(library)
    with pytest.raises(SettingError, match="has 2 of the name 'trip': say which") as refused:
        entry_named(library, "trip")
    assert one.id[:8] in str(refused.value) and two.id[:8] in str(refused.value)
    assert entry_named(library, two.id[:8]) == two


def test_names_that_no_document_can_have(model: LoadedModel, library: Library) -> None:
    talk = asked(model)
    for name in ("\n", " ", "\u3000"):
        with pytest.raises(SettingError, match="needs a name"):
            add_document(library, talk, name)
    assert not library.folder.exists()
    keep(library, talk, "trip")
    with pytest.raises(SettingError, match="trip is a conversation"):
        add_document(library, talk, "trip")


def test_removing(model: LoadedModel, library: Library) -> None:
    with pytest.raises(SettingError, match=r"no 'report.pdf': it is empty; `kvlite read FILE`"):
        remove(library, "report.pdf")
    added = add_document(library, read(model))
    with pytest.raises(SettingError, match=r"no 'other': there is report\.pdf"):
        remove(library, "other")
    assert remove(library, "report.pdf") == added.nbytes
    assert names(library) == [] and not added.path.parent.exists()


def aged(added: Added, seconds: float) -> int:
    os.utime(added.path.parent / "record.json", (seconds, seconds))
    return added.nbytes


def three(library: Library, model: LoadedModel) -> int:
    """Entries a, b and c, used in this order; the most that one takes."""
    talk = read(model)
    return max(
        aged(add_document(library, talk, name), 1_000_000 + at) for at, name in enumerate("abc")
    )


def test_a_limit_takes_what_was_not_used_for_longest(model: LoadedModel, library: Library) -> None:
    size = three(library, model)
    assert limit(library) is None
    entries.used(entry_named(library, "a"))
    assert set_limit(library, f"{3 * size + 99}B") == []
    assert add_document(library, read(model), "d").removed == ["b"]
    assert names(library) == ["a", "c", "d"] and limit(library) == 3 * size + 99
    assert add_document(library, read(model), "d").removed == []
    assert set_limit(library, f"{2 * size + 99}B") == ["c"]
    assert set_limit(library, "none") == [] and limit(library) is None
    assert add_document(library, read(model), "e").removed == []
    assert names(library) == ["a", "d", "e"]


def test_a_limit_takes_of_a_conversation_only_what_can_be_read_again(
    model: LoadedModel, library: Library
) -> None:
    size = three(library, model)
    talk = asked(model)
    added = keep(library, talk, "trip")
    aged(added, 1)  # used before all others
    assert set_limit(library, f"{3 * size + 9_999}B") == []
    assert not added.path.exists()
    assert names(library) == ["a", "b", "c", "trip"]
    assert set_limit(library, "1KiB") == ["a", "b", "c"]
    (entry,) = entries.entries(library)
    assert entry.about is not None and entry.about.light and entry.about.messages == 2
    again = Conversation(model, settings())
    with Snapshot(entry.about.path) as saved:
        saved.restore(again)
    assert again.messages == talk.messages and again.token_ids == talk.token_ids


def test_what_another_program_writes_is_not_removed(
    model: LoadedModel, library: Library, tmp_path: Path
) -> None:
    size = three(library, model)
    elsewhere = Library(root=tmp_path / "data")
    with elsewhere.hold(entry_named(library, "a").id):
        with pytest.raises(SettingError, match='"a" is open in another kvlite'):
            remove(library, "a")
        assert set_limit(library, f"{2 * size}B") == ["b"]
    assert names(library) == ["a", "c"]
    remove(library, "a")


def test_a_limit_takes_nothing_whose_record_cannot_be_read(
    model: LoadedModel, library: Library
) -> None:
    """It may be a conversation, or of a later version."""
    added = keep(library, asked(model), "trip")
    record = added.path.with_name("record.json")
    record.write_text("{")
    assert set_limit(library, "1KiB") == []
    assert record.exists() and added.path.exists()


def test_what_was_just_saved_stays_even_where_clocks_disagree(
    model: LoadedModel, library: Library
) -> None:
    size = three(library, model)
    later = time.time() + 9999
    for entry in entries.entries(library):
        os.utime(entry.path / "record.json", (later, later))
    set_limit(library, f"{3 * size + 99}B")
    assert len(add_document(library, read(model), "d").removed) == 1 and "d" in names(library)


def test_what_is_larger_than_the_limit_is_not_saved(model: LoadedModel, library: Library) -> None:
    size = three(library, model)
    set_limit(library, f"{size + 99}B")
    assert names(library) == ["c"]
    with pytest.raises(SnapshotError, match=r"would take .*, and the limit is .*: raise it"):
        add_document(library, read(model, Document("long.txt", TEXT * 2, ())))
    assert names(library) == ["c"] and len([*library.folder.glob("*/whole.kv")]) == 1


def test_limits_that_are_none(library: Library) -> None:
    for size in ("", "lots", "-3GiB", "3", "NONE"):
        with pytest.raises(SettingError, match="is not a size: give 50GiB, 800MB or none"):
            set_limit(library, size)
    assert not library.folder.exists()
    library.folder.mkdir(parents=True)
    for text in (b"\xff\xfe", b"many", b""):
        (library.folder / "limit").write_bytes(text)
        with pytest.raises(SettingError, match="kvlite library limit SIZE"):
            limit(library)


def test_damaged_entries_are_listed_and_can_be_removed(
    model: LoadedModel, library: Library
) -> None:
    added = add_document(library, read(model))
    whole = added.path
    (library.folder / "half.kv").write_bytes(whole.read_bytes()[:500])
    (library.folder / "notes.txt").write_text("mine")
    found = {each.name: each for each in entries.entries(library)}
    assert set(found) == {"report.pdf", "half"}
    assert found["half"].about is None and "damaged or cut short" in found["half"].flaw
    assert matching(library, model, [REPORT], settings()) == found["report.pdf"]
    remove(library, "half")
    whole.write_bytes(b"")
    assert add_document(library, read(model)).name == "report.pdf"  # nobody misses the other
    assert names(library) == ["report.pdf"]
    added.path.with_name("record.json").write_text("{")
    (entry,) = entries.entries(library)
    assert "record.json cannot be read" in entry.flaw
    remove(library, entry.name)
    assert names(library) == []


def test_listing_while_others_save_and_remove(model: LoadedModel, library: Library) -> None:
    talk, done = read(model), threading.Event()
    add_document(library, talk, "stays")

    def busy() -> None:
        own = Library()
        for turn in range(15):
            add_document(own, talk, f"{turn % 3}")
            remove(own, f"{turn % 3}")
        done.set()

    thread = threading.Thread(target=busy)
    thread.start()
    while not done.is_set():
        found = entries.entries(library)
        assert "stays" in {each.name for each in found} and not any(each.flaw for each in found)
    thread.join()
    assert names(library) == ["stays"]


def test_what_010_kept_is_moved_into_folders(model: LoadedModel, library: Library) -> None:
    """Saved conversations and documents were files, and the app's conversations elsewhere."""
    library.folder.mkdir(parents=True)
    read(model).save(library.folder / "report.pdf.kv")
    asked(model).save(library.folder / "trip.kv")
    os.utime(library.folder / "trip.kv", (1_000_000, 1_000_000))
    apps = Library(root=library.root / "as it was")
    record = apps.new()
    record.name = "on the page"
    apps.save(record)
    (library.root / "app").mkdir()
    apps.folder.rename(library.root / "app" / "everyone")
    library = open_library()
    found = {each.name: each for each in entries.entries(library)}
    assert set(found) == {"report.pdf", "trip", "on the page"}
    assert not [*library.folder.glob("*.kv")]
    document, trip = found["report.pdf"], found["trip"]
    assert document.record is not None and trip.record is not None
    assert document.record.is_document and document.record.waiting == ["report.pdf"]
    assert matching(library, model, [REPORT], settings()) == document
    question = trip.record.said[0]
    assert (question.text, question.documents) == ("11 12", ("report.pdf",))
    assert trip.used == 1_000_000 and trip.is_conversation and trip.record.waiting == []
    assert found["on the page"].id == record.id
    assert entries.entries(library) == entries.entries(library)


def test_what_cannot_be_moved_keeps_nothing_else_from_it(
    model: LoadedModel, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.folder.mkdir(parents=True)
    read(model).save(library.folder / "report.pdf.kv")
    former = library.root / "app" / "everyone"
    former.mkdir(parents=True)
    for record in (library.new(), library.new()):
        library.save(record)
        library.place(record.id).rename(former / record.id)
    rename, stuck = os.rename, min(former.iterdir())

    def renamed(source: Path, *given: Any) -> None:
        if source == stuck:
            raise OSError(18, "it is on another disk")
        rename(source, *given)

    monkeypatch.setattr(os, "rename", renamed)
    assert sorted(names(open_library())) == ["New conversation", "report.pdf"]
    assert [*former.iterdir()] == [stuck]


class KilledError(BaseException):
    pass


def is_killed(root: Path, at: int, *, after: bool) -> bool:
    """Whether converting what is there came so far that it was killed: before or after the step
    number `at` that changes a file's name."""
    done = 0

    def step(does: Any, *given: Any) -> None:
        nonlocal done
        done += 1
        if done <= at or after:
            does(*given)
        if done > at:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename"):
            patch.setattr(os, name, partial(step, getattr(os, name)))
        try:
            open_library(root=root)
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("after", [False, True])
def test_a_conversion_that_is_killed_goes_on(
    model: LoadedModel, library: Library, tmp_path: Path, after: bool
) -> None:
    library.folder.mkdir(parents=True)
    read(model).save(library.folder / "report.pdf.kv")
    asked(model).save(library.folder / "trip.kv")
    served = library.root / "server" / "8000" / "model" / "3.kv"
    served.parent.mkdir(parents=True)
    asked(model).save(served)
    record = library.new()
    (library.root / "app" / "everyone").mkdir(parents=True)
    library.save(record)
    library.place(record.id).rename(library.root / "app" / "everyone" / record.id)
    steps, goes_on = 0, True
    while goes_on:
        root = shutil.copytree(library.root, tmp_path / f"killed {steps}")
        goes_on = is_killed(root, steps, after=after)
        opened = open_library(root=root)
        found = entries.entries(opened)
        assert sorted(each.name for each in found) == [
            "A program's conversation",
            "New conversation",
            "report.pdf",
            "trip",
        ]
        flawed = [each.name for each in found if each.flaw]
        assert flawed == ["New conversation"]  # which has no file
        assert not [*root.glob("library/*.kv"), *root.glob("server/*/*/*.kv")]
        steps += 1
    assert steps > 6
