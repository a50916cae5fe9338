"""A reading that was stopped goes on where it was if the same is said again, and else was never."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from weakref import ref

import pytest

import kvlite
from kvlite import Callbacks, Stopped
from kvlite.cache import KVCache
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.errors import SettingError
from kvlite.model.load import LoadedModel
from tests.test_speculate import alike

LONG = "The river rose in the night, and nobody saw it. " * 40
WAYS: dict[str, dict[str, Any]] = {
    "compressed": {"budget": "60", "recall_entries": 8},
    "forgotten": {"budget": "60", "recall": "off"},
    "in 4 bits": {"method": "full", "kv_bits": "4"},
    "whole": {"method": "full", "recall": "off"},
}


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return kvlite.load(str(tiny_folder)).model


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlite.conversation.run_stats.SLICE_S", 0.0)


def opened(model: LoadedModel, **given: Any) -> Conversation:
    talk = Conversation(model, Settings(max_new_tokens=6, chunk=64, **given))
    talk.history.keeps_half_read = True
    list(talk.stream("Hello."))
    return talk


def stopped(talk: Conversation, share: float, work: Callable[..., Any]) -> float:
    """Do work until so much of it is read; how much of the whole was told of."""
    cancel, told = Event(), [0.0]

    def progress(done: int, total: int) -> None:
        told.append(done / total)
        if done >= share * total:
            cancel.set()

    with pytest.raises(Stopped):
        work(callbacks=Callbacks(progress=progress, cancel=cancel))
    assert talk.history.half_read is not None
    return told[-1]


def said(talk: Conversation, text: str) -> tuple[list[int | None], list[float]]:
    """What is answered, and how far reading was whenever it said so."""
    told: list[float] = []
    callbacks = Callbacks(progress=lambda done, total: told.append(done / total))
    pieces = [*talk.stream(text, callbacks=callbacks)]
    return [piece.token_id for piece in pieces], told


@pytest.mark.parametrize("way", WAYS)
def test_what_was_read_is_not_read_again(model: LoadedModel, way: str) -> None:
    plain, talk = opened(model, **WAYS[way]), opened(model, **WAYS[way])
    expected, _ = said(plain, LONG)
    at = 0.0
    for share in (0.2, 0.57, 0.8):
        begun, at = at, stopped(talk, share, lambda **given: [*talk.stream(LONG, **given)])
        assert begun < at < 1
    told = said(talk, LONG)
    assert told[0] == expected and min(told[1]) > 0.8
    assert talk.messages == plain.messages and talk.history.half_read is None
    alike(talk, plain)


@pytest.mark.cases(7, 14)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "between", ["another message", "undo", "check", "save", "branch", "other settings", "read"]
)
def test_anything_else_finds_the_conversation_as_it_was(
    model: LoadedModel, way: str, between: str, tmp_path: Path
) -> None:
    plain, talk = opened(model, **WAYS[way]), opened(model, **WAYS[way])
    stopped(talk, 0.5, lambda **given: [*talk.stream(LONG, **given)])
    for each in (plain, talk):
        if between == "undo":
            each.undo()
        elif between == "check":
            [*each.check()]
        elif between == "save":
            each.save(tmp_path / "talk.kv")
        elif between == "branch":
            with pytest.raises(SettingError):
                each.branch(1)
            each.regenerate()
        elif between == "other settings":
            each.settings = each.settings.replace({"temperature": 0.5, "seed": 3})
            [*each.stream(LONG)]
        elif between == "read":
            each.read("Something else.")
        [*each.stream("And now?")]
    assert talk.history.half_read is None
    assert talk.messages == plain.messages
    alike(talk, plain)


def used(model: LoadedModel, *, stops: bool) -> ref[KVCache]:
    """The cache of a conversation that is over."""
    talk = opened(model, method="full")
    if stops:
        stopped(talk, 0.5, lambda **given: [*talk.stream(LONG, **given)])
    [*talk.stream("And now?")]
    return ref(talk.cache)


@pytest.mark.parametrize("stops", [False, True])
def test_nothing_is_held_once_it_ends(model: LoadedModel, *, stops: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        assert used(model, stops=stops)() is None
    finally:
        gc.enable()


def test_whoever_goes_on_is_told_what_is_planned(model: LoadedModel) -> None:
    talk, told = opened(model, method="full"), list[int]()
    planned = Callbacks(planned=told.append)
    stopped(
        talk,
        0.5,
        lambda callbacks: [*talk.stream(LONG, callbacks=replace(callbacks, planned=told.append))],
    )
    [*talk.stream(LONG, callbacks=planned)]
    assert len(told) == 2 and 0 < told[1] < told[0]


def test_a_document_that_is_read_ahead_goes_on(model: LoadedModel) -> None:
    plain, talk = (opened(model, method="full") for _ in range(2))
    at = stopped(talk, 0.57, lambda **given: talk.read_ahead(LONG, **given))
    told: list[float] = []
    more = Callbacks(progress=lambda done, total: told.append(done / total))
    assert plain.read_ahead(LONG) and talk.read_ahead(LONG, callbacks=more)
    assert min(told) > at > 0.5
    for each in (plain, talk):
        [*each.stream(LONG + "What rose?")]
    alike(talk, plain)
