"""What Python callers give that cannot be: one sentence, and the conversation goes on."""

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvlite
from kvlite.config.settings import OPTIONS
from kvlite.conversation.metrics import Piece
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import KvliteError, SettingError, SnapshotError


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> kvlite.Runner:
    return kvlite.load(str(tiny_folder), method="full", max_new_tokens=3)


def ids_of(pieces: Iterator[Piece]) -> list[int | None]:
    return [piece.token_id for piece in pieces]


def require_same(talk: kvlite.Conversation, fresh: kvlite.Conversation) -> None:
    """Both answer alike."""
    assert talk.messages == fresh.messages
    assert talk.token_ids == fresh.token_ids
    assert ids_of(talk.stream("And now?")) == ids_of(fresh.stream("And now?"))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ([True], "a list with True in it"),
        ([5, [6]], r"a list with \[6\] in it"),
        ([5.0], "a list with 5.0 in it"),
        ([None], "a list with None in it"),
        (np.array([True]), "a list with True in it"),
        (np.array([[5, 6]]), r"a list with \[5, 6\] in it"),
        (torch.tensor(5), "Tensor"),
        (None, "NoneType"),
        (b"ab", "bytes"),
        ({"input_ids": [3]}, "dict"),
    ],
)
def test_what_is_no_list_of_tokens_is_named(runner: kvlite.Runner, wrong: Any, named: str) -> None:
    talk = runner.conversation()
    for call in (runner.generate, talk.generate, talk.read):
        with pytest.raises(SettingError, match=f"^{named} is not a list of token ids: "):
            call(wrong)
    require_same(talk, runner.conversation())


def test_tokens_of_no_vocabulary_and_none_at_all_are_refused(runner: kvlite.Runner) -> None:
    talk = runner.conversation()
    for tokens, said in (
        ([-1], "token -1 is not in this model's vocabulary"),
        ([5, 49_152], "token 49152 is not in this model's vocabulary"),
    ):
        for call in (talk.generate, talk.read):
            with pytest.raises(SettingError, match=said):
                call(tokens)
    with pytest.raises(SettingError, match="at least one token"):
        runner.generate([])
    with pytest.raises(SettingError, match="is not a list of token ids"):
        runner.generate("hello")  # type: ignore[arg-type]
    assert talk.cache.seen == 0 == len(talk.token_ids)


@pytest.mark.parametrize(
    "tokens",
    [[np.int64(5), np.int32(6)], np.array([5, 6], np.uint16), torch.tensor([5, 6]), (5, 6)],
)
def test_whole_numbers_of_any_library_are_tokens(runner: kvlite.Runner, tokens: Any) -> None:
    talk = runner.conversation()
    talk.read(tokens)
    assert talk.token_ids == [5, 6]
    assert {type(token) for token in talk.token_ids} == {int}
    assert runner.generate(tokens).token_ids == runner.generate([5, 6]).token_ids


def test_numbers_of_any_library_are_settings(runner: kvlite.Runner, tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_new_tokens": np.int64(2), "temperature": np.float32(0.5)}
    talk = runner.conversation(**given, seed=np.uint8(3), budget=np.int64(40))
    assert (
        talk.settings
        == runner.conversation(max_new_tokens=2, temperature=0.5, seed=3, budget=40).settings
    )
    list(talk.stream("One"))
    list(talk.edit(np.int64(1), "Two"))  # type: ignore[arg-type]
    talk.switch(np.int64(0))  # type: ignore[arg-type]
    talk.save(tmp_path / "talk.kv")
    with pytest.raises(SettingError, match="out of range"):
        runner.conversation(max_new_tokens=np.float64(2.0))


@pytest.mark.parametrize("wrong", [None, b"x", ["a"]])
def test_what_is_no_text_is_not_said(runner: kvlite.Runner, wrong: Any) -> None:
    talk, fresh = runner.conversation(), runner.conversation()
    for each in (talk, fresh):
        list(each.stream("One"))
    for call in (talk.stream, talk.read_ahead, lambda text: talk.edit(1, text)):
        with pytest.raises(SettingError, match="is not text: say something in a string"):
            list(call(wrong))
    require_same(talk, fresh)


@pytest.mark.parametrize("wrong", [0, 3, -1, True, "1", 1.0])
def test_there_is_no_message_of_that_number(runner: kvlite.Runner, wrong: Any) -> None:
    talk, fresh = runner.conversation(), runner.conversation()
    for each in (talk, fresh):
        list(each.stream("One"))
        list(each.stream("Two"))
    for call in (lambda: list(talk.edit(wrong, "Three")), lambda: talk.branch(wrong)):
        with pytest.raises(SettingError, match=r"there is no message .*: they are numbered from 1"):
            call()
    if wrong != 0:
        with pytest.raises(SettingError, match="there is no branch"):
            talk.switch(wrong)
    require_same(talk, fresh)


@pytest.mark.parametrize("wrong", [None, print, {"cancel": None}])
def test_callbacks_that_are_none_are_refused_at_once(runner: kvlite.Runner, wrong: Any) -> None:
    for option, value in (("cancel", 5), ("cancel", print), ("progress", 5), ("notify", "x")):
        with pytest.raises(SettingError, match=f"^{option} .* (give|: give)"):
            kvlite.Callbacks(**{option: value})  # type: ignore[arg-type]
    talk, fresh, said = runner.conversation(), runner.conversation(), {"callbacks": wrong}
    for each in (talk, fresh):
        list(each.stream("One"))
        list(each.stream("Two"))
    calls: list[Callable[[], Any]] = [
        lambda: talk.read("Three", **said),
        lambda: talk.read_ahead("Three", **said),
        lambda: talk.generate([5], **said),
        lambda: list(talk.stream("Three", **said)),
        lambda: list(talk.regenerate(**said)),
        lambda: list(talk.check(**said)),
        lambda: list(talk.edit(1, "Three", **said)),
        lambda: talk.branch(1, **said),
        lambda: talk.undo(**said),
        lambda: talk.switch(0, **said),
    ]
    for call in calls:
        with pytest.raises(SettingError, match=r"^callbacks .* is not a .*: give one"):
            call()
    require_same(talk, fresh)


def test_where_nothing_can_be_saved_nothing_is(
    runner: kvlite.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talk, none = runner.conversation(), r"is no file's name: give a \.kv file's path"
    list(talk.stream("One"))
    named = dict.fromkeys(("", ".", "x" * 5000, "no folder/talk.kv"), r": (name|check|give) ")
    for wrong, said in (*named.items(), *((each, none) for each in (None, 5, b"x", "a\0b", ["a"]))):
        for call in (talk.save, runner.open):
            with pytest.raises(SnapshotError, match=said):
                call(wrong)  # type: ignore[arg-type]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_neither_replaced_nor_waited_for(runner: kvlite.Runner, tmp_path: Path) -> None:
    """Nor is a device: it was removed, and a file put in its place."""
    pipe = tmp_path / "talk.kv"
    os.mkfifo(pipe)
    for call in (runner.conversation().save, runner.open):
        with pytest.raises(SnapshotError, match="is a device or a pipe: name a"):
            call(pipe)
    assert pipe.is_fifo()


def test_other_wrong_values_are_one_sentence(runner: kvlite.Runner, tmp_path: Path) -> None:
    talk, path = runner.conversation(), tmp_path / "talk.kv"
    talk.save(path)
    calls: list[Callable[[], Any]] = [
        lambda: runner.open(path, progress=5),  # type: ignore[arg-type]
        lambda: runner.open(path, reading=5),  # type: ignore[arg-type]
        lambda: talk.save(path, progress=5),  # type: ignore[arg-type]
        lambda: kvlite.load(notify=5),  # type: ignore[arg-type]
        lambda: kvlite.load(""),
        lambda: kvlite.load(b"x"),  # type: ignore[arg-type]
        lambda: runner.generate([5], "5"),  # type: ignore[arg-type]
        lambda: runner.generate([5], max_tokens=5),
        *(
            partial(runner.conversation, **{name: value})
            for name in {*OPTIONS} - {"stop", "logit_bias", "seed"}
            for value in ([], {}, object())
        ),
    ]
    for call in calls:
        with pytest.raises(KvliteError) as refused:
            call()
        assert "\n" not in str(refused.value)


def test_what_is_told_of_a_reading_cannot_read(runner: kvlite.Runner) -> None:
    """It would come into the middle of what is being read."""
    talk, fresh = runner.conversation(), runner.conversation()
    inner: list[Callable[[], Any]] = [
        lambda: talk.read("More"),
        lambda: list(talk.stream("More")),
        lambda: talk.save("never.kv"),
        lambda: talk.undo(),
    ]
    refused = []

    def progress(done: int, total: int) -> None:
        while inner:
            with pytest.raises(SettingError, match="this conversation is busy") as told:
                inner.pop()()
            refused.append(told)

    assert ids_of(talk.stream("One", callbacks=Callbacks(progress=progress))) == ids_of(
        fresh.stream("One")
    )
    assert len(refused) == 4
    require_same(talk, fresh)


def test_of_two_threads_one_is_refused(runner: kvlite.Runner) -> None:
    """While the other is in the middle of reading; then both can go on."""
    talk, fresh = runner.conversation(), runner.conversation()
    reading, done = threading.Event(), threading.Event()
    heard: list[int | None] = []

    def progress(read: int, total: int) -> None:
        reading.set()
        done.wait(60)

    def work() -> None:
        heard.extend(ids_of(talk.stream("One", callbacks=Callbacks(progress=progress))))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert reading.wait(60)
        for call in (lambda: list(talk.stream("Two")), lambda: talk.read([5]), talk.undo):
            with pytest.raises(SettingError, match="open another one for each thread"):
                call()  # type: ignore[operator]
    finally:
        done.set()
        thread.join()
    assert heard == ids_of(fresh.stream("One"))
    require_same(talk, fresh)
