"""Light files: what they leave out is read again, and what follows is what would have followed."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import kvlite
from kvlite.config.settings import Settings
from kvlite.conversation import tensor_file as tensorfile
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.snapshot import Snapshot
from kvlite.documents import Document
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.step import StepRows
from kvlite.errors import InterruptedCacheError, OutOfMemory, SettingError, SnapshotError, Stopped
from tests.conftest import Tiny, make_tiny
from tests.contract.talks import (
    FIRST,
    LONG,
    OTHER,
    SECOND,
    SMALL,
    WORDS,
    again,
    entries,
    gone_ways,
    opened,
    said,
    same,
)
from tests.faults import Faults
from tests.test_snapshot_refused import refused


def follows(talk: Conversation, straight: Conversation) -> None:
    """It goes on bit by bit: what is held in between the next turn makes anew."""
    assert said(talk, WORDS[5]) == said(straight, WORDS[5])
    same(talk, straight)


def test_it_takes_kilobytes_and_says_what_it_is(llama: Tiny, tmp_path: Path) -> None:
    talk = gone_ways(llama, budget="40")
    talk.documents = (Document("a.txt", LONG, (0,)),)
    light, whole = talk.save(tmp_path / "light.kv", light=True), talk.save(tmp_path / "whole.kv")
    assert light < 6000 < whole / 10
    with Snapshot(tmp_path / "light.kv") as file:
        about = file.about
        assert about.light and about.tokens == len(talk.token_ids) and not about.recalls
        assert not [name for name in load_file(file.path) if name.startswith(("cache", "tier"))]
    with Snapshot(tmp_path / "whole.kv") as file:
        assert not file.about.light
    assert again(llama, tmp_path / "light.kv").documents == talk.documents


def test_an_older_kvlite_refuses_it_and_opens_what_is_whole(
    llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = gone_ways(llama, budget="40")
    talk.save(tmp_path / "light.kv", light=True)
    talk.save(tmp_path / "whole.kv")
    monkeypatch.setattr(tensorfile, "FORMAT", 1)  # all that the first version knew
    again(llama, tmp_path / "whole.kv")
    with pytest.raises(SnapshotError, match=r"made by a newer kvlite .*: update kvlite to open it"):
        again(llama, tmp_path / "light.kv")


def test_what_was_read_ahead_stays_read(llama: Tiny, tmp_path: Path) -> None:
    for first in ((), (FIRST, WORDS[1])):
        talk, straight = opened(llama, budget="40"), opened(llama, budget="40")
        for each in (talk, straight):
            said(each, *first)
            assert each.read_ahead(LONG)
        talk.save(tmp_path / "talk.kv", light=True)
        talk = again(llama, tmp_path / "talk.kv")
        assert talk.store is not None and straight.store is not None
        assert talk.store.seen == straight.store.seen
        with pytest.raises(SettingError, match="does not begin with what was read ahead"):
            said(talk, OTHER)
        assert said(talk, f"{LONG} 5 6") == said(straight, f"{LONG} 5 6")
        assert talk.context.turn is not None and len(talk.context.turn.ids) < 9
        follows(talk, straight)


def test_token_ids_are_read_in_the_parts_they_came_in(llama: Tiny, tmp_path: Path) -> None:
    """Of what was no message too: what was dropped then was chosen then."""
    given, ids = {"budget": "40", "recall": "off", "method": "snapkv"}, [*range(3, 90)]
    talk, straight = opened(llama, **given), opened(llama, **given)
    for each in (talk, straight):
        each.read(ids)
        each.read(ids[::-1])
    talk.save(tmp_path / "talk.kv", light=True)
    talk = again(llama, tmp_path / "talk.kv")
    for mine, theirs in zip(entries(talk), entries(straight), strict=True):
        for held, expected in zip(mine, theirs, strict=True):
            assert all(one.equal(other) for one, other in zip(held, expected, strict=True))
    assert talk.generate([5, 6]).token_ids == straight.generate([5, 6]).token_ids


def test_an_answer_that_goes_on_is_saved_as_far_as_it_was_heard(
    llama: Tiny, tmp_path: Path
) -> None:
    talk, straight = opened(llama, budget="40"), opened(llama, budget="40")
    said(talk, FIRST)
    said(straight, FIRST)
    going, other = talk.stream(SECOND), straight.stream(SECOND)
    for _ in range(3):
        next(going)
        next(other)
    talk.save(tmp_path / "talk.kv", light=True)
    list(going)  # saving it changed nothing
    other.close()
    talk = again(llama, tmp_path / "talk.kv")
    assert talk.messages == straight.messages and talk.messages[3]["content"]
    follows(talk, straight)


def test_what_was_interrupted_can_be_saved_light(
    llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, straight = opened(llama), opened(llama)
    going = talk.stream(FIRST)
    for _ in range(3):
        next(going)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(StepRows, "came_through", interrupted)
        patched.setattr(StepRows, "rewind", interrupted)
        next(going)
    with pytest.raises(InterruptedCacheError):
        talk.save(tmp_path / "talk.kv")
    talk.save(tmp_path / "talk.kv", light=True)
    talk = again(llama, tmp_path / "talk.kv")
    going = straight.stream(FIRST)
    for _ in range(3):
        next(going)
    going.close()
    assert talk.messages == straight.messages
    assert said(talk, SECOND) == said(straight, SECOND)


def test_how_far_reading_is_can_be_followed_and_stopped(llama: Tiny, tmp_path: Path) -> None:
    talk = gone_ways(llama, budget="40")
    talk.save(tmp_path / "talk.kv", light=True)
    told, notes, read = list[tuple[int, int]](), list[str](), list[int]()
    stop = threading.Event()
    runner = kvlite.Runner(llama.model, Settings())
    runner.open(
        tmp_path / "talk.kv",
        progress=lambda done, of: read.append(of),
        reading=Callbacks(lambda *at: told.append(at), notes.append),
    )
    tokens = len(talk.token_ids)
    assert {*read} == {(tmp_path / "talk.kv").stat().st_size}
    assert told == sorted(told) and {of for _, of in told} == {tokens}
    assert len({done for done, _ in told}) > 3 and 0 < told[0][0] < tokens == told[-1][0]
    assert notes == [f"{tokens:,} tokens are read again"]
    with pytest.raises(Stopped):
        reading = Callbacks(lambda *at: stop.set(), cancel=stop)
        runner.open(tmp_path / "talk.kv", reading=reading)
    assert again(llama, tmp_path / "talk.kv").messages == talk.messages


@pytest.mark.long
def test_memory_that_ends_while_it_is_read_again(llama: Tiny, tmp_path: Path) -> None:
    talk = gone_ways(llama, budget="40", never_lossy=True)
    talk.save(tmp_path / "talk.kv", light=True)
    with Faults(cap=40_000), pytest.raises(OutOfMemory, match="the conversation is kept"):
        again(llama, tmp_path / "talk.kv")
    assert again(llama, tmp_path / "talk.kv").messages == talk.messages


def test_what_was_given_up_stays_given_up(llama: Tiny, tmp_path: Path) -> None:
    talk = gone_ways(llama, budget="40")
    talk.context.oom_policy.taken = ["smaller chunk", "smaller budget"]
    talk.save(tmp_path / "talk.kv", light=True)
    opened_again = again(llama, tmp_path / "talk.kv")
    assert opened_again.context.oom_policy.taken == talk.context.oom_policy.taken
    follows(opened_again, talk)


@pytest.mark.parametrize("messages", [True, False])
def test_what_was_compacted_is_saved_whole(tmp_path: Path, messages: bool) -> None:
    """Its tokens would not give back what the cache holds."""
    tiny = make_tiny("llama", **SMALL)
    given = {"budget": "40", "beyond_context": "compact", "recall": "off"}
    talk, straight = opened(tiny, **given), opened(tiny, **given)
    for each in (talk, straight):
        if messages:
            said(each, FIRST, FIRST, FIRST)
        else:
            for _ in range(3):
                each.generate([*range(3, 103)])
    for _ in range(2):
        talk.save(tmp_path / "talk.kv", light=True)
        with Snapshot(tmp_path / "talk.kv") as saved:
            assert not saved.about.light
        talk = again(tiny, tmp_path / "talk.kv")
    same(talk, straight)


def test_what_is_wrong_with_one_is_told_before_it_is_read(
    llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, talk = tmp_path / "talk.kv", gone_ways(llama, budget="40")
    talk.save(path, light=True)
    whole = path.read_bytes()
    monkeypatch.setattr("kvlite.conversation.context.Context.read", None)
    for cut in range(0, len(whole), 97):
        path.write_bytes(whole[:cut])
        refused_light(llama, path)
    for at in range(8, len(whole), 61):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
        refused_light(llama, path)


def refused_light(tiny: Tiny, path: Path) -> None:
    with pytest.raises(SnapshotError) as error:
        again(tiny, path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_one_is_never_taken_for_a_whole_one(llama: Tiny, tmp_path: Path) -> None:
    gone_ways(llama, budget="40").save(tmp_path / "talk.kv", light=True)
    with Snapshot(tmp_path / "talk.kv") as saved, pytest.raises(SnapshotError):
        saved.about = replace(saved.about, light=False)
        saved.restore(Conversation(llama.model, Settings()))
    refused(make_tiny("llama", num_hidden_layers=3).model, tmp_path / "talk.kv", "another model")
