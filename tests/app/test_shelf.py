"""Conversations on disk, as people see them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlite.errors import SettingError
from kvlite_app.keeping.record import Branch, Record, Said, keys_of
from kvlite_app.keeping.shelf import Shelf
from kvlite_app.views.history import history, start_of

said = st.builds(
    Said,
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
    shelf = Shelf("", tmp_path)
    assert shelf.records() == []
    one, two = shelf.new(), shelf.new()
    one.name_after("  What is\na cache? ")
    one.used, two.used = 10, 20
    two.said = [Said("user", "Where is Äthiopien?"), Said("assistant", "In Africa.")]
    shelf.save(one)
    shelf.save(two)
    assert [each.id for each in shelf.records()] == [two.id, one.id]
    assert [each.title for each in shelf.records()] == ["New conversation", "What is a cache?"]
    assert [each.id for each in shelf.records("äthiopien africa")] == [two.id]
    assert shelf.records("africa caches") == []
    assert shelf.rename(one.id, "  Caches \n and more ").name == "Caches and more"
    assert shelf.record(one.id).name == "Caches and more"
    assert [each.title for each in shelf.records("caches")] == ["Caches and more"]
    shelf.delete(two.id)
    assert not shelf.has(two.id)
    assert [each.id for each in shelf.records()] == [one.id]


def test_a_copy_of_a_folder_is_another_conversation(tmp_path: Path) -> None:
    shelf = Shelf("", tmp_path)
    one, copy = shelf.new(), "b" * 32
    shelf.save(one)
    for name in (copy, "no id"):
        shutil.copytree(shelf.place(one.id), shelf.folder / name)
    assert {each.id for each in shelf.records()} == {one.id, copy}
    shelf.rename(copy, "The copy")
    assert shelf.record(one.id).name == ""


@pytest.mark.parametrize(
    "odd",
    [
        {"name": 7},
        {"used": "yesterday"},
        {"said": [{"role": "user", "text": None, "documents": []}]},
        {"said": 5},
        {"branches": ["one"]},
        [],
    ],
)
def test_one_odd_record_hides_no_other(tmp_path: Path, odd: Any) -> None:
    shelf = Shelf("", tmp_path)
    good, other = shelf.new(), shelf.new()
    shelf.save(good)
    shelf.save(other)
    plain = json.loads(other.to_json()) | odd if odd else odd
    (shelf.place(other.id) / "record.json").write_text(json.dumps(plain))
    assert [each.id for each in shelf.records("new")] == [good.id]
    with pytest.raises(SettingError, match="cannot be read"):
        shelf.record(other.id)


def test_users_do_not_see_each_others(tmp_path: Path) -> None:
    anns, bens, everyones = (Shelf(name, tmp_path) for name in ("ann", "../ann", ""))
    record = anns.new()
    anns.save(record)
    assert len({anns.folder, bens.folder, everyones.folder}) == 3
    assert all((tmp_path / "app") == each.folder.parent for each in (anns, bens, everyones))
    for other in (bens, everyones):
        assert other.records() == []
        assert not other.has(record.id)
        with pytest.raises(SettingError, match="was deleted"):
            other.record(record.id)


@pytest.mark.parametrize("id", ["", "..", "../" * 3, "a" * 31, "A" * 32, "g" * 32, "/" + "a" * 31])
def test_what_is_no_id_reaches_no_file(tmp_path: Path, id: str) -> None:
    shelf = Shelf("", tmp_path)
    assert not shelf.has(id)
    with pytest.raises(SettingError, match="no conversation"):
        shelf.record(id)
    with pytest.raises(SettingError, match="no conversation"):
        shelf.delete(id)


def test_a_broken_record_hides_itself_and_nothing_else(tmp_path: Path) -> None:
    shelf = Shelf("", tmp_path)
    good, bad = shelf.new(), shelf.new()
    shelf.save(good)
    shelf.save(bad)
    for text in ("", "{", "[]", "null", '{"id": 3}', '{"said": 1, "branches": []}'):
        (shelf.place(bad.id) / "record.json").write_text(text)
        assert [each.id for each in shelf.records()] == [good.id]
        with pytest.raises(SettingError, match="cannot be read"):
            shelf.record(bad.id)


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    shelf = Shelf("", tmp_path)
    record = shelf.new()
    shelf.save(record)
    shelf.keep_account(record.id, "0" * 16, {"brief": "", "told": []})
    files = [path for path in shelf.folder.rglob("*") if path.is_file()]
    assert len(files) == 2
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_whole_conversations_give_way_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    shelf = Shelf("", tmp_path)
    made = [shelf.new() for _ in range(3)]
    for age, record in enumerate(made):
        shelf.save(record)
        shelf.whole(record.id).write_bytes(b"0" * 100)
        os.utime(shelf.whole(record.id), (1000 - age, 1000 - age))
    monkeypatch.setattr(Shelf, "room_for_whole", lambda self: 250)
    shelf.make_room()
    assert [shelf.whole(record.id).exists() for record in made] == [True, True, False]
    Shelf("ann", tmp_path).make_room()  # the disk is everybody's
    monkeypatch.setattr(Shelf, "room_for_whole", lambda self: 150)
    Shelf("ann", tmp_path).make_room()
    assert [shelf.whole(record.id).exists() for record in made] == [True, False, False]


def test_an_account_belongs_to_an_answer_and_all_before_it(tmp_path: Path) -> None:
    shelf = Shelf("", tmp_path)
    record = shelf.new()
    record.said = [
        Said("user", "a", ("x.pdf",)),
        Said("assistant", "b"),
        Said("user", "a"),
        Said("assistant", "b"),
    ]
    shelf.save(record)
    keys = keys_of(record.said)[1::2]
    assert keys[0] != keys[1]
    shelf.keep_account(record.id, keys[0], {"brief": "damaged"})
    assert shelf.account(record.id, keys[0]) == {}
    shelf.keep_account(record.id, keys[1], {"brief": "from all 9 tokens", "told": ["One.", "Two."]})
    shown = history(record, shelf)
    told = [
        each for each in shown.messages if each.get("metadata", {}).get("title") != "About x.pdf"
    ]
    assert [each["content"] for each in told] == ["a", "b", "a", "b", "One.\n\nTwo."]
    assert told[-1]["metadata"]["title"] == "from all 9 tokens"
    assert shown.numbers == [1, 1, 1, 2, 2, 2]
    assert shown.answer_keys() == keys


@pytest.mark.parametrize("others", [2, 3, 4, 9])
def test_of_a_long_conversation_the_latest_is_shown(
    tmp_path: Path, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a message of the user's on, numbered as in all of it."""
    monkeypatch.setattr("kvlite_app.views.history.LATEST", 5)
    shelf = Shelf("", tmp_path)
    record = shelf.new()
    pairs = [[Said("user", f"{n}?", ("x.pdf",)), Said("assistant", f"{n}.")] for n in range(others)]
    record.said = [each for pair in pairs for each in pair]
    start = start_of(record.said)
    every, latest = history(record, shelf), history(record, shelf, start)
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


def test_an_export_has_all_that_was_said() -> None:
    record = Record("0" * 32, name="Trip", model="m")
    record.said = [Said("user", "Where?", ("map.pdf",)), Said("assistant", "There.")]
    text = record.markdown()
    for part in ("# Trip", "Where?", "*About map.pdf*", "There.", "**m**", "**You**"):
        assert part in text
    assert json.loads(record.to_json())["said"][1]["text"] == "There."
