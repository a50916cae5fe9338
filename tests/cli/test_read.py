"""`kvlite read` and what `kvlite ask` makes of it."""

import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from kvlite import load
from kvlite.config.settings import Settings
from kvlite.conversation.entries import entry_named
from kvlite.conversation.library import Library
from kvlite.conversation.session import Session
from kvlite.engine.callbacks import NO_CALLBACKS
from tests.cli.conftest import Done, Refused, Run, one_sentence
from tests.cli.test_interrupts import INTERRUPTED

OPENED = (
    r"Opened text\.txt, read just now \(\d+ tokens, [\d.]+ [KM]iB\); --no-library reads it anew\."
)


@pytest.fixture
def folder(data: Path) -> Path:
    """Where the library is."""
    return data / "library"


def file_of(name: str) -> Path:
    """The file that an entry of the library is opened from."""
    about = entry_named(Library(), name).about
    assert about is not None
    return about.path


@pytest.fixture
def flags(model: Path) -> tuple[object, ...]:
    return "--model", model, "--budget", "64", "--max-tokens", "6"


def test_a_document_is_read_once(
    kvlite: Run, text: Path, flags: tuple[object, ...], folder: Path
) -> None:
    anew = kvlite("ask", text, "Who sat?", *flags)
    made = kvlite("read", text, *flags)
    assert (made.code, made.out) == (0, "")
    size = entry_named(Library(), "text.txt").nbytes
    said = r"Read (\d+) tokens in [\d.]+ s; kept ([\d.]+) KiB as text\.txt, in [\d.]+ s\.\n"
    match = re.fullmatch(said, made.err)
    assert match and int(match[1]) > 250 and abs(float(match[2]) - size / 1024) < 0.1
    done = kvlite("ask", text, "Who sat?", *flags)
    assert (done.code, done.out) == (0, anew.out)
    assert re.search(OPENED, done.err) and re.search(r"^read \d\d tokens", done.err, re.MULTILINE)
    assert "Opened" not in anew.err
    again = kvlite("ask", text, "Who sat?", *flags, "--no-library")
    assert again.out == anew.out and "Opened" not in again.err
    dropped = kvlite("read", text, *flags, "--recall", "off")
    one_sentence(dropped, "--recall off", "give --recall auto")
    other = kvlite("ask", text, "Who sat?", "--method", "tova", *flags, "--json", "-q")
    assert other.err == "" and other.json()["prompt_tokens"] < 40
    assert other.json()["method"] == "tova"


@pytest.mark.long
def test_a_chat_opens_what_was_read(
    kvlite: Run,
    text: Path,
    flags: tuple[object, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chat(*words: object) -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who sat?\nWho lay?\n"))
        return kvlite("chat", *words, *flags)

    anew = chat(text)
    kvlite("read", text, *flags)
    opened, by_name = chat(text), chat(file_of("text.txt"))
    assert anew.code == opened.code == by_name.code == 0
    assert re.search(OPENED, opened.err) and "Opened" not in anew.err
    assert anew.out == opened.out == by_name.out and len(anew.out.split()) > 2
    again = chat(text, "--no-library")
    assert again.out == anew.out and "Opened" not in again.err


@pytest.mark.long
def test_a_file_is_asked_by_itself(
    kvlite: Run, text: Path, flags: tuple[object, ...], tmp_path: Path, folder: Path
) -> None:
    anew = kvlite("ask", text, "Who sat?", *flags, "--temperature", "0.8", "--seed", "3").out
    path = tmp_path / "it.kv"
    made = kvlite(
        "read", text, *flags, "--out", path, "--json", "--temperature", "0.8", "--seed", "3"
    )
    about = made.json()
    assert about["path"] == str(path) and about["bytes"] == path.stat().st_size
    assert about["documents"] == ["text.txt"] and about["tokens"] > 250 and not folder.exists()
    text.unlink()
    # Neither the document nor any setting is needed again; those that are given count.
    done = kvlite("ask", path, "Who sat?")
    assert (done.code, done.out) == (0, anew)
    short = kvlite("ask", path, "Who sat?", "--max-tokens", "2", "--json", "-q").json()
    assert short["generated_tokens"] == 2 and short["budget"] == 64


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["--name", " "], ("needs a name",)),
        (["--out", "it.txt"], ("--out it.txt", "name it it.kv")),
        (["--out", "nowhere/it.kv"], ("--out nowhere/it.kv", "no folder")),
        (["--out", "it.kv", "--name", "it"], ("--name or --out", "not both")),
    ],
)
def test_bad_input(
    refused: Refused, model: Path, text: Path, given: list[str], parts: tuple[str, ...]
) -> None:
    refused(["read", text, "--model", model, *given], *parts)


@pytest.mark.long
def test_interrupted_while_saving(
    kvlite: Run,
    text: Path,
    flags: tuple[object, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsync = os.fsync

    def interrupt(handle: int) -> None:
        signal.raise_signal(signal.SIGINT)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", interrupt)
    done = kvlite("read", text, *flags, "-q")
    assert (done.code, done.out, [*folder.rglob("*.*")]) == (INTERRUPTED, "", [])


@pytest.mark.long
def test_conversations_and_foreign_files_do_not_give_way(
    refused: Refused, model: Path, text: Path, tmp_path: Path
) -> None:
    session = Session(load(str(model), max_new_tokens=2), Settings())
    list(session.say("Who sat?")(NO_CALLBACKS))
    session.save("trip", None)
    trip = file_of("trip")
    mine, said = tmp_path / "mine.kv", trip.read_bytes()
    mine.write_text("mine")
    read = ["read", text, "--model", model]
    refused([*read, "--name", "trip"], "trip is a conversation", "remove it")
    refused([*read, "--out", trip], f"{trip} is there already, and is a conversation")
    refused([*read, "--out", mine], f"{mine} is there already, and cannot be opened")
    assert (trip.read_bytes(), mine.read_text()) == (said, "mine")


def test_a_file_of_other_documents_does_not_give_way(
    kvlite: Run, refused: Refused, flags: tuple[object, ...], text: Path, tmp_path: Path
) -> None:
    path, other = tmp_path / "it.kv", tmp_path / "other.txt"
    other.write_text("The dog sat on the mat.")
    for _ in range(2):  # the same document gives way
        assert kvlite("read", other, "--out", path, *flags, "-q").code == 0
    refused(["read", text, "--out", path, *flags], f"{path} is there already, and holds other.txt")


def test_a_folder_that_cannot_be_written_is_told_of_before_anything_is_read(
    refused: Refused, text: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "file" / "data"))
    for command in (["read", text], ["calibrate"]):
        refused([*command, "--model", model], f"{tmp_path / 'file'} cannot be used", "KVLITE_DATA")


@pytest.fixture
def light(
    kvlite: Run, text: Path, flags: tuple[object, ...], model: Path, folder: Path
) -> tuple[Path, Path]:
    """A document that was read, and the same without its cache, in the library."""
    kvlite("read", text, *flags, "--name", "whole")
    talk = load(str(model)).open(file_of("whole"))
    talk.save(folder / "light.kv", light=True)  # as earlier versions had it
    kvlite("library")
    return file_of("whole"), file_of("light")


@pytest.mark.long
def test_a_light_file_is_read_again(
    kvlite: Run, light: tuple[Path, Path], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = (kvlite("ask", path, "Who sat?") for path in light)
    assert whole.code == other.code == 0 and whole.out == other.out
    assert "are read again" in other.err and "are read again" not in whole.err
    outs = []
    for path in light:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who sat?\nWho lay?\n"))
        done = kvlite("chat", path)
        assert done.code == 0
        outs.append(done.out)
    assert outs[0] == outs[1]
