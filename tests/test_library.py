"""The library: what is there, what opens, what has to go."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlite.config.settings import Settings
from kvlite.conversation import library
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.snapshot import Snapshot
from kvlite.documents import Document
from kvlite.errors import SettingError, SnapshotError
from kvlite.model.chat_template import all_of
from kvlite.model.load import LoadedModel
from tests.conftest import make_tiny

TEXT = "7 8 9 10 " * 30
REPORT = Document("report.pdf", TEXT, (0, 4))
SIZE = Callable[[], int]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_tiny("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48).model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "library"


def settings(**given: Any) -> Settings:
    usual = {"budget": 40, "max_new_tokens": 3, "recall": "ram", "method": "snapkv"}
    return Settings(**{**usual, **given})


def read(model: LoadedModel, *documents: Document, **given: Any) -> Conversation:
    talk = Conversation(model, settings(**given))
    talk.documents = documents or (REPORT,)
    assert talk.read_ahead(all_of(talk.documents))
    return talk


def names() -> list[str]:
    return sorted(each.name for each in library.entries())


def test_what_was_read_is_found_again(model: LoadedModel, folder: Path) -> None:
    assert library.entries() == [] and library.matching(model, [REPORT], settings()) is None
    added = library.add(read(model))
    assert (added.name, added.path) == ("report.pdf", folder / "report.pdf.kv")
    assert added.nbytes == added.path.stat().st_size and added.removed == []
    (entry,) = library.entries()
    assert entry.about is not None and entry.about.documents == ("report.pdf",)
    assert entry.about.tokens > 100 and abs(entry.used - time.time()) < 60
    found = library.matching(model, [REPORT], settings())
    assert found == entry


@pytest.mark.cases(11)
@pytest.mark.parametrize(
    ("read_with", "asked_with", "opens"),
    [
        ({}, {"method": "tova", "budget": 60}, True),
        ({}, {"method": "full"}, True),
        ({}, {"kv_bits": "4", "temperature": 0.5, "seed": 1, "recall": "disk", "chunk": 7}, True),
        ({}, {"recall": "off"}, False),
        ({}, {"recall_bits": "8"}, False),
        ({"recall_bits": "4"}, {"recall_bits": "4"}, True),
        ({"recall_bits": "4"}, {}, False),
        ({}, {"method": "h2o"}, False),
        ({"method": "h2o"}, {"method": "h2o", "budget": 60}, True),
        ({"method": "h2o"}, {}, False),
        ({}, {"method": "kvzip"}, False),
        ({"method": "full"}, {}, True),
        ({"method": "pyramidinfer", "budget": 400}, {"method": "pyramidinfer"}, False),
        (
            {"method": "pyramidinfer", "budget": 400},
            {"method": "pyramidinfer", "budget": 400, "recall": "auto"},
            True,
        ),
        ({"method": "pyramidinfer", "budget": 400}, {}, False),
        ({}, {"method": "minference+snapkv"}, False),
    ],
)
def test_it_opens_where_reading_anew_would_give_the_same(
    model: LoadedModel, read_with: dict[str, Any], asked_with: dict[str, Any], opens: bool
) -> None:
    library.add(read(model, **read_with))
    own = settings(**asked_with)
    found = library.matching(model, [REPORT], own)
    assert (found is not None) == opens
    if found is None:
        return
    with Snapshot(found.path) as saved:
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


def test_other_documents_and_other_models_do_not_match(model: LoadedModel) -> None:
    library.add(read(model))
    other = make_tiny("llama-rope-linear", num_hidden_layers=2, hidden_size=32).model
    for documents in (
        [Document("report.pdf", TEXT + "11", (0, 4))],
        [Document("other.pdf", TEXT, (0, 4))],
        [REPORT, REPORT],
    ):
        assert library.matching(model, documents, settings()) is None
    assert library.matching(other, [REPORT], settings()) is None
    talk = read(model)
    list(talk.stream(f"{all_of([REPORT])} 11 12"))
    library.add(talk, "report.pdf")  # in its place
    assert names() == ["report.pdf"]
    assert library.matching(model, [REPORT], settings()) is None


def test_names(model: LoadedModel, folder: Path) -> None:
    changed = Document("report.pdf", TEXT + "11", ())
    assert library.add(read(model)).name == "report.pdf"
    assert library.add(read(model, recall_bits="8")).name == "report.pdf"
    assert library.add(read(model, changed)).name == "report.pdf (2)"
    assert library.add(read(model, REPORT, changed)).name == "report.pdf and 1 more"
    odd = Document('../..a/b:"c".txt', TEXT, ())
    assert library.add(read(model, odd)).path == folder / "_..a_b__c_.txt.kv"
    bytes_in_it = Document(" a\udcff.txt ", TEXT, ())
    assert library.add(read(model, bytes_in_it)).path == folder / "a_.txt.kv"
    spaced = Document("\u3000. x.txt", TEXT, ())
    assert library.add(read(model, spaced)).path == folder / "x.txt.kv"
    for number in ("", " (2)"):
        pictured = Document("😀" * 60, TEXT + number, ())
        assert library.add(read(model, pictured)).name.endswith(f"😀{number}")
    long = Document("ä b " * 80 + ".txt", TEXT, ())
    assert library.add(read(model, long)).path.is_file()
    talk = Conversation(model, settings())
    talk.generate([5, 6, 7])
    assert [library.add(talk).name for _ in range(2)] == ["conversation", "conversation (2)"]
    assert library.add(talk, "mine").name == "mine"
    assert {path.parent for path in folder.iterdir()} == {folder}


@pytest.mark.parametrize(
    "name",
    [".", "..", ".x", "a/b", "a\\b", "a\0", "a:b", "x" * 201, "a\n", " ", " a", "a ", "\udcff"],
)
def test_names_that_are_none(model: LoadedModel, name: str, folder: Path) -> None:
    for does in (
        lambda: library.add(read(model), name),
        lambda: library.remove(name),
        lambda: library.path_of(name),
    ):
        with pytest.raises(SettingError, match="is not a valid name"):
            does()
    assert not folder.exists()


def test_removing(model: LoadedModel) -> None:
    with pytest.raises(SettingError, match=r"no 'report.pdf': it is empty; `kvlite read FILE`"):
        library.remove("report.pdf")
    added = library.add(read(model))
    with pytest.raises(SettingError, match=r"no 'other': there is report\.pdf"):
        library.remove("other")
    assert library.remove("report.pdf") == added.nbytes
    assert names() == []


def three(model: LoadedModel) -> int:
    """Entries a, b and c, used in this order; the size of each."""
    talk = read(model)
    for at, name in enumerate("abc"):
        added = library.add(talk, name)
        os.utime(added.path, (1_000_000 + at, 1_000_000 + at))
    return added.nbytes


def test_a_limit_takes_what_was_not_used_for_longest(model: LoadedModel) -> None:
    size = three(model)
    assert library.limit() is None
    library.used(library.path_of("a"))
    assert library.set_limit(f"{3 * size + 9}B") == []
    assert library.add(read(model), "d").removed == ["b"]
    assert names() == ["a", "c", "d"] and library.limit() == 3 * size + 9
    assert library.add(read(model), "d").removed == []
    assert library.set_limit(f"{2 * size + 9}B") == ["c"]
    assert library.set_limit("none") == [] and library.limit() is None
    assert library.add(read(model), "e").removed == [] and names() == ["a", "d", "e"]


def test_a_limit_takes_no_conversation(model: LoadedModel) -> None:
    size = three(model)
    talk = read(model)
    list(talk.stream(f"{all_of([REPORT])} 11 12"))
    path = library.add(talk, "trip").path
    os.utime(path, (1, 1))  # used before all others
    assert library.set_limit(f"{path.stat().st_size + size}B") == ["a", "b"]
    assert library.set_limit("1KiB") == ["c"]
    assert names() == ["trip"]


def test_what_was_just_saved_stays_even_where_clocks_disagree(model: LoadedModel) -> None:
    size = three(model)
    later = time.time() + 9999
    for entry in library.entries():
        os.utime(entry.path, (later, later))
    library.set_limit(f"{3 * size + 9}B")
    assert len(library.add(read(model), "d").removed) == 1 and "d" in names()


def test_what_is_larger_than_the_limit_is_not_saved(model: LoadedModel) -> None:
    size = three(model)
    library.set_limit(f"{size + 9}B")
    assert names() == ["c"]
    with pytest.raises(SnapshotError, match=r"would take .*, and the limit is .*: raise it"):
        library.add(read(model, Document("long.txt", TEXT * 2, ())))
    assert names() == ["c"]


@pytest.mark.parametrize("size", ["", "lots", "-3GiB", "3", "NONE"])
def test_limits_that_are_none(size: str, folder: Path) -> None:
    with pytest.raises(SettingError, match="is not a size: give 50GiB, 800MB or none"):
        library.set_limit(size)
    assert not folder.exists()


def test_a_limit_that_was_damaged(folder: Path) -> None:
    folder.mkdir(parents=True)
    for text in (b"\xff\xfe", b"many", b""):
        (folder / "limit").write_bytes(text)
        with pytest.raises(SettingError, match="kvlite library limit SIZE"):
            library.limit()


def test_damaged_entries_are_listed_and_can_be_removed(model: LoadedModel, folder: Path) -> None:
    added = library.add(read(model))
    (folder / "half.kv").write_bytes(added.path.read_bytes()[:500])
    (folder / "notes.txt").write_text("mine")
    entries = {each.name: each for each in library.entries()}
    assert set(entries) == {"report.pdf", "half"}
    assert entries["half"].about is None and "damaged or cut short" in entries["half"].flaw
    assert library.matching(model, [REPORT], settings()) == entries["report.pdf"]
    library.remove("half")
    added.path.write_bytes(b"")
    assert library.add(read(model)).name == "report.pdf"  # nobody misses what cannot be opened
    assert names() == ["report.pdf"]


def test_listing_while_others_save_and_remove(model: LoadedModel) -> None:
    talk, done = read(model), threading.Event()
    library.add(talk, "stays")

    def busy() -> None:
        for turn in range(15):
            library.add(talk, f"{turn % 3}")
            library.remove(f"{turn % 3}")
        done.set()

    thread = threading.Thread(target=busy)
    thread.start()
    while not done.is_set():
        found = library.entries()
        assert "stays" in {each.name for each in found} and not any(each.flaw for each in found)
    thread.join()
    assert names() == ["stays"]


def test_how_long_ago() -> None:
    now = time.time()
    for seconds, said in (
        (-5, "just now"),
        (59, "just now"),
        (61, "1 minute ago"),
        (7201, "2 hours ago"),
        (86_401 * 3, "3 days ago"),
    ):
        assert library.ago(now - seconds) == said
