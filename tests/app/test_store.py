"""Conversations on disk, as people see them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlite.conversation.export import as_json, as_markdown
from kvlite.conversation.library import Library, drop_deleted
from kvlite.conversation.record import Branch, Record, StoredMessage, keys_of
from kvlite.errors import SettingError
from kvlite_app.views.history import history, start_of

said = st.builds(
    StoredMessage,
    st.sampled_from(["user", "assistant"]),
    st.text(max_size=40),
    st.lists(st.text(max_size=10), max_size=2).map(tuple),
)
records = st.builds(
    Record,
    st.uuids().map(lambda each: each.hex),
    name=st.text(max_size=30),
    said=st.lists(said, max_size=5),
    branches=st.lists(st.builds(Branch, st.text(max_size=9), st.booleans()), max_size=3),
    waiting=st.lists(st.text(max_size=9), max_size=2),
    draft=st.text(max_size=20),
    changed=st.dictionaries(st.sampled_from(["top_k", "seed"]), st.integers(0, 9)),
)


@given(records)
def test_a_record_is_the_same_after_a_file(record: Record) -> None:
    assert Record.from_json(record.to_json()) == record


def test_conversations_are_kept_listed_renamed_and_deleted(tmp_path: Path) -> None:
    store = Library("", tmp_path)
    assert store.records() == []
    one, two = store.new(), store.new()
    one.name_after("  What is\na cache? ")
    one.used, two.used = 10, 20
    two.said = [
        StoredMessage("user", "Where is Äthiopien?"),
        StoredMessage("assistant", "In Africa."),
    ]
    store.save(one)
    store.save(two)
    assert [each.id for each in store.records()] == [two.id, one.id]
    assert [each.title for each in store.records()] == ["New conversation", "What is a cache?"]
    assert [each.id for each in store.records("äthiopien africa")] == [two.id]
    assert store.records("africa caches") == []
    assert store.rename(one.id, "  Caches \n and more ").name == "Caches and more"
    assert store.record(one.id).name == "Caches and more"
    assert [each.title for each in store.records("caches")] == ["Caches and more"]
    store.delete(two.id)
    assert not store.has(two.id)
    assert [each.id for each in store.records()] == [one.id]


def test_what_was_deleted_last_can_be_restored_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Library("", tmp_path)
    one, two = store.new(), store.new()
    for each in (one, two):
        each.name_after(each.id)
        store.save(each)
    store.delete(one.id)
    (store.place(one.id) / "answers").mkdir(parents=True)  # which something wrote meanwhile
    deleted = store.deleted()
    assert deleted is not None and (deleted.id, deleted.title) == (one.id, one.title)
    store.restore(one.id)
    assert store.deleted() is None and store.record(one.id) == one
    store.sweep()
    assert {each.id for each in store.records()} == {one.id, two.id}

    store.delete(one.id)
    store.delete(two.id)
    with pytest.raises(SettingError, match="was deleted"):
        store.restore(one.id)  # another was deleted since
    monkeypatch.setattr("kvlite.conversation.library._RESTORED", -1)
    store.restore(two.id)
    store.delete(two.id)
    assert store.deleted() is None
    with pytest.raises(SettingError, match="was deleted"):
        store.restore(two.id)
    assert not [*tmp_path.rglob("record.json")]
    assert store.records() == []


@pytest.mark.parametrize(
    "odd",
    [
        {"name": 7},
        {"used": "yesterday"},
        {"said": [{"role": "user", "text": None, "documents": []}]},
        {"said": 5},
        {"branches": ["one"]},
        {"id": 3},
        [],
    ],
)
def test_one_odd_record_hides_no_other(tmp_path: Path, odd: Any) -> None:
    store = Library("", tmp_path)
    good, other = store.new(), store.new()
    store.save(good)
    store.save(other)
    plain = json.loads(other.to_json()) | odd if odd else odd
    (store.place(other.id) / "record.json").write_text(json.dumps(plain))
    assert [each.id for each in store.records("new")] == [good.id]
    with pytest.raises(SettingError, match="cannot be read"):
        store.record(other.id)


def test_users_do_not_see_each_others(tmp_path: Path) -> None:
    anns, bens, everyones = (Library(name, tmp_path) for name in ("ann", "../ann", ""))
    record = anns.new()
    anns.save(record)
    assert len({anns.folder, bens.folder, everyones.folder}) == 3
    assert anns.folder.parent == bens.folder.parent == tmp_path / "app"
    assert everyones.folder == tmp_path / "library"
    for other in (bens, everyones):
        assert other.records() == []
        assert not other.has(record.id)
        with pytest.raises(SettingError, match="was deleted"):
            other.record(record.id)


@pytest.mark.parametrize("id", ["", "..", "../" * 3, "a" * 31, "A" * 32, "g" * 32, "/" + "a" * 31])
def test_what_is_no_id_reaches_no_file(tmp_path: Path, id: str) -> None:
    store = Library("", tmp_path)
    assert not store.has(id)
    with pytest.raises(SettingError, match="no conversation"):
        store.record(id)
    with pytest.raises(SettingError, match="no conversation"):
        store.delete(id)


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    store = Library("", tmp_path)
    record = store.new()
    store.save(record)
    store.keep_account(record.id, "0" * 16, {"brief": "", "told": []})
    files = [path for path in store.folder.rglob("*") if path.is_file()]
    assert len(files) == 2
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_whole_conversations_give_way_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    store = Library("", tmp_path)
    made = [store.new() for _ in range(3)]
    for age, record in enumerate(made):
        store.save(record)
        store.light(record.id).write_bytes(b"0")
        store.whole(record.id).write_bytes(b"0" * 100)
        os.utime(store.whole(record.id), (1000 - age, 1000 - age))
    monkeypatch.setattr(Library, "room_for_whole", lambda self: 250)
    store.make_room()
    assert [store.whole(record.id).exists() for record in made] == [True, True, False]
    Library("ann", tmp_path).make_room()  # the disk is everybody's
    monkeypatch.setattr(Library, "room_for_whole", lambda self: 150)
    Library("ann", tmp_path).make_room()
    assert [store.whole(record.id).exists() for record in made] == [True, False, False]


def test_an_account_belongs_to_an_answer_and_all_before_it(tmp_path: Path) -> None:
    store = Library("", tmp_path)
    record = store.new()
    record.said = [
        StoredMessage("user", "a", ("x.pdf",)),
        StoredMessage("assistant", "b"),
        StoredMessage("user", "a"),
        StoredMessage("assistant", "b"),
    ]
    store.save(record)
    keys = keys_of(record.said)[1::2]
    assert keys[0] != keys[1]
    store.keep_account(record.id, keys[0], {"brief": "damaged"})
    assert store.account(record.id, keys[0]) == {}
    store.keep_account(record.id, keys[1], {"brief": "from all 9 tokens", "told": ["One.", "Two."]})
    shown = history(record, store)
    told = [
        each for each in shown.messages if each.get("metadata", {}).get("title") != "About x.pdf"
    ]
    assert [each["content"] for each in told] == ["a", "b", "a", "b", "- One.\n- Two."]
    assert told[-1]["metadata"]["title"] == "from all 9 tokens"
    assert shown.numbers == [1, 1, 1, 2, 2, 2]
    assert shown.answer_keys() == keys


@pytest.mark.parametrize("others", [3, 9])
def test_of_a_long_conversation_the_latest_is_shown(
    tmp_path: Path, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a message of the user's on, numbered as in all of it."""
    monkeypatch.setattr("kvlite_app.views.history.LATEST", 5)
    store = Library("", tmp_path)
    record = store.new()
    pairs = [
        [StoredMessage("user", f"{n}?", ("x.pdf",)), StoredMessage("assistant", f"{n}.")]
        for n in range(others)
    ]
    record.said = [each for pair in pairs for each in pair]
    start = start_of(record.said)
    every, latest = history(record, store), history(record, store, start)
    assert (every.before, len(every.messages)) == (0, 3 * others)
    first = len(every.messages) - len(latest.messages)
    assert latest.messages == every.messages[first:]
    assert latest.numbers == every.numbers[first:]
    assert latest.keys == every.keys[first:]
    assert latest.before == latest.numbers[0] - 1 == max(0, others - 3)
    assert latest.messages[0]["metadata"]["title"] == "About x.pdf"
    assert start_of(record.said, start) == start_of(record.said, 2 * others) == start
    # Where all were asked for they stay, and where these are not many more than usual they go.
    assert start_of(record.said, 0) == (0 if 2 * others > 9 else start)


def test_an_export_has_all_that_was_said_and_where_it_came_from(tmp_path: Path) -> None:
    store, record = Library("", tmp_path), Record("0" * 32, name="Trip", model="m")
    record.said = [
        StoredMessage("user", "Where?", ("map.pdf",)),
        StoredMessage("assistant", "There."),
    ]
    place = {"document": "map.pdf", "page": 3, "where": "page iii", "start": 2, "end": 9}
    source = {**place, "text": "It is there.", "before": "BEFORE", "after": ""}
    account = {"brief": "", "told": [], "sources": [source]}
    store.keep_account(record.id, keys_of(record.said)[1], account)
    text = as_markdown(record, store)
    cited = "1. map.pdf, page iii: \u201cIt is there.\u201d"
    for part in ("# Trip", "Where?", "*About map.pdf*", "There.", "**m**", "**You**", cited):
        assert part in text
    asked, answer = json.loads(as_json(record, store))["said"]
    assert answer["text"] == "There." and "sources" not in asked
    assert answer["sources"] == [{**place, "text": "It is there."}]


def test_what_was_deleted_is_removed_when_the_app_ends_or_begins(tmp_path: Path) -> None:
    store = Library("", tmp_path)
    for end in (store.close, lambda: drop_deleted(tmp_path)):
        record = store.new()
        store.save(record)
        store.delete(record.id)
        assert len([*tmp_path.rglob("record.json")]) == 1
        end()
        assert not [*tmp_path.rglob("record.json")]
