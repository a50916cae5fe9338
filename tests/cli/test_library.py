"""`kvlite library`: list, remove, limit."""

import os
from pathlib import Path

import pytest

from kvlite import load
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.conversation.entries import entries, entry_named
from kvlite.conversation.library import Library
from kvlite.conversation.session import Session
from kvlite.conversation.tensor_file import _summed
from kvlite.engine.callbacks import NO_CALLBACKS
from tests.cli.conftest import Done, Refused, Run, one_sentence


@pytest.fixture
def folder(data: Path) -> Path:
    """Where the library is."""
    return data / "library"


@pytest.fixture
def full(kvlite: Run, model: Path, text: Path, folder: Path) -> int:
    """Three entries, a used first; the size of each."""
    for at, name in enumerate("abc"):
        kvlite("read", text, "--model", model, "--budget", "64", "--name", name)
        record = entry_named(Library(), name).path / "record.json"
        os.utime(record, (1_000_000 + at,) * 2)
    return max(each.nbytes for each in entries(Library()))


def test_empty(kvlite: Run, folder: Path) -> None:
    assert kvlite("library").out == (
        "The library is empty: `kvlite read FILE` puts a document there.\n"
    )
    found = kvlite("library", "--json").json()
    assert found == {"folder": str(folder), "bytes": 0, "limit": None, "entries": []}


@pytest.mark.long
def test_what_is_listed_limited_and_removed(
    kvlite: Run, full: int, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    whole = entry_named(Library(), "a").path / "whole.kv"
    (folder / "half.kv").write_bytes(whole.read_bytes()[:500])
    for command in (("library",), ("library", "list")):
        shown = kvlite(*command)
        assert (shown.code, shown.err) == (0, "")
        rows = [line.split()[1] for line in shown.out.splitlines() if line.startswith("│")]
        assert rows == ["half", "c", "b", "a"]
        assert "damaged" in shown.out and "the default" in shown.out and model.name in shown.out
    found = kvlite("library", "list", "--json").json()
    assert found == kvlite("library", "--json").json()
    sizes = [each.nbytes for each in entries(Library())]
    assert found["bytes"] == sum(sizes) and found["folder"] == str(folder)
    half, last, *_ = found["entries"]
    assert "damaged or cut short" in half["flaw"] and "tokens" not in half
    assert (last["name"], last["used"]) == ("c", "1970-01-12T13:46:42Z")
    assert last["kind"] == "document" and half["kind"] == ""
    assert last["documents"] == ["text.txt"] and last["model"] == str(model)
    assert last["tokens"] > 250 and last["messages"] == 0 and last["flaw"] == ""
    one_sentence(kvlite("library", "remove", "a", "x"), "'x'", "there is half, c, b, a")
    assert kvlite("library", "remove", "half", "a", "half").err.startswith("Removed half, a")
    locks = {each.name for each in (folder / "locks").iterdir()}
    assert locks == {each.id for each in entries(Library())}
    assert kvlite("library", "limit") == Done(0, "", "There is no limit.\n")
    done = kvlite("library", "limit", f"{full + 99}B")
    assert "Removed b, to keep to it.\n" in done.err
    assert kvlite("library", "limit", "--json").json() == {"limit": full + 99, "removed": []}
    assert kvlite("library", "limit", "none", "--json").json() == {"limit": None, "removed": []}
    size = entry_named(Library(), "c").nbytes
    assert kvlite("library", "remove", "c", "--json").json() == {"removed": ["c"], "bytes": size}
    one_sentence(kvlite("library", "remove", "c"), "'c'", "it is empty", "kvlite read FILE")


def test_conversations_stay_and_it_is_said(kvlite: Run, model: Path, folder: Path) -> None:
    session = Session(load(str(model), max_new_tokens=2), Settings())
    list(session.say("Who sat?")(NO_CALLBACKS))
    session.save("trip", None)
    session.leave_library()
    done = kvlite("library", "limit", "1KiB")
    nbytes = entry_named(Library(), "trip").nbytes
    assert done.code == 0 and done.err == (
        f"The limit is 1.0 KiB.\nConversations take {readable(nbytes)}, and stay: "
        "`kvlite library remove NAME`.\n"
    )
    assert "stay" not in kvlite("library", "limit", "1GiB").err


def test_bad_input(refused: Refused) -> None:
    refused(["library", "limit", "lots"], "'lots'", "give 50GiB, 800MB or none")
    refused(["library", "remove", "a/b"], "'a/b'", "it is empty")
    refused(["library", "remove"], "kvlite library remove --help")
    refused(["library", "burn"], "burn", "kvlite library --help")


def test_a_folder_that_cannot_be_used_is_named(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    monkeypatch.setenv("KVLITE_DATA", str(file))
    refused(["library", "limit", "5GiB"], f"{file / 'library'} cannot be used", "KVLITE_DATA")
    assert file.read_text() == "mine"


def test_a_bad_file_is_named_and_passed_over(
    kvlite: Run, model: Path, text: Path, folder: Path
) -> None:
    folder.mkdir(parents=True)
    header = b'{"__metadata__":{"crc32":"00000000"' + b"[" * 100_000
    bad = folder / "bad.kv"
    bad.write_bytes(_summed(len(header).to_bytes(8, "little") + header))
    listed = kvlite("library")
    assert listed.code == 0 and listed.out.count("bad.kv is damaged or cut short") == 1
    asked = kvlite("ask", text, "Why?", "--model", model, "--max-tokens", "1")
    assert asked.code == 0 and asked.err.count(f"{bad} is damaged or cut short") == 1
    assert "it is passed over" in asked.err
