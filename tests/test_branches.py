"""Going back in a conversation: what follows is as if nothing else had ever been said."""

import threading
from functools import partial

import pytest

from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError, Stopped
from tests.conftest import Tiny
from tests.contract.talks import (
    FIRST,
    GIVEN,
    LONG,
    OTHER,
    SECOND,
    THIRD,
    WORDS,
    heard,
    opened,
    said,
    same,
)


@pytest.mark.parametrize("limit", ["auto", "0MB"])
def test_a_way_that_cannot_be_gone_is_left_at_a_message(llama: Tiny, limit: str) -> None:
    talk = opened(llama, budget="40", checkpoint_limit=limit)
    said(talk, FIRST, SECOND, THIRD)
    list(talk.edit(2, OTHER))
    here, there = talk.branches[1].messages, talk.branches[0].messages
    stop = threading.Event()

    def after_a_message(done: int, of: int) -> None:
        if done == of:
            stop.set()

    with pytest.raises(Stopped):
        talk.switch(0, callbacks=Callbacks(progress=after_a_message, cancel=stop))
    assert [each.messages for each in talk.branches[:2]] == [there, here]
    assert talk.branches[2].current and talk.messages == there[: len(talk.messages)]
    fresh = opened(llama, budget="40")
    texts = [message["content"] for message in talk.messages if message["role"] == "user"]
    assert said(fresh, *texts, WORDS[1])[-1] == said(talk, WORDS[1])[0]
    talk.switch(0)
    assert talk.messages == there
    assert (
        said(talk, WORDS[2])[0]
        == said(opened(llama, budget="40"), FIRST, SECOND, THIRD, WORDS[2])[3]
    )


@pytest.mark.parametrize("act", ["undo", "branch"])
def test_going_back_that_is_stopped_forgets_nothing(llama: Tiny, act: str) -> None:
    given = {"budget": "40", "recall": "off", "checkpoint_limit": "0MB"}
    talk, told, stop = opened(llama, **given), list[str](), threading.Event()
    said(talk, FIRST, SECOND, THIRD)
    way, go = [*talk.messages], talk.undo if act == "undo" else partial(talk.branch, 1)

    def after_a_message(done: int, of: int) -> None:
        if done == of:
            stop.set()

    with pytest.raises(Stopped):
        go(callbacks=Callbacks(progress=after_a_message, notify=told.append, cancel=stop))
    assert stop.is_set() and any("read again" in each for each in told)
    assert [each.messages for each in talk.branches] == [way, way[: len(talk.messages)]]
    assert talk.branches[1].current and len(talk.messages) < len(way)
    texts = [message["content"] for message in talk.messages[::2]]
    fresh = opened(llama, **given)
    assert said(fresh, *texts, OTHER)[-1] == said(talk, OTHER)[0]
    talk.switch(0)
    go()
    assert talk.messages == way[: 4 if act == "undo" else 2]


def test_a_document_stays_read_when_its_question_changes(llama: Tiny) -> None:
    talk, fresh = opened(llama, budget="40"), opened(llama, budget="40")
    assert talk.read_ahead(LONG)
    said(talk, f"{LONG} 5 6 7", SECOND)
    told: list[str] = []
    list(talk.edit(1, f"{LONG} 8 9", callbacks=Callbacks(notify=told.append)))
    assert talk.context.turn is not None and len(talk.context.turn.ids) < 5 and not told
    fresh.read_ahead(LONG)
    said(fresh, f"{LONG} 8 9")
    same(talk, fresh)
    # Another document is another beginning.
    list(talk.edit(1, "1 2 3 4 5"))
    fresh = opened(llama, budget="40")
    said(fresh, "1 2 3 4 5")
    same(talk, fresh)


@pytest.mark.parametrize("name", ["full", "recall", "recall-4", "four bits recalled"])
def test_what_was_read_ahead_is_forgotten(llama: Tiny, name: str) -> None:
    talk, fresh = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    for before in ((), (FIRST,)):
        for each in (talk, fresh):
            said(each, *before)
        assert talk.read_ahead(LONG)
        seen = talk.cache.seen
        talk.forget_ahead()
        assert talk.cache.seen < seen and len(talk.branches) == 1
        talk.forget_ahead()  # of nothing
        assert said(talk, OTHER) == said(fresh, OTHER)
        assert talk.context.turn is not None and talk.context.turn.ahead == (0, 0.0)
        same(talk, fresh)


def test_what_settings_change_is_heeded_when_it_is_answered_again(llama: Tiny) -> None:
    talk = opened(llama, budget="40")
    (answer,) = said(talk, FIRST)
    drawn = heard(talk.regenerate(temperature=2.0, seed=1))
    assert drawn != answer
    assert drawn == said(opened(llama, budget="40", temperature=2.0, seed=1), FIRST)[0]
    longer = heard(talk.regenerate(max_new_tokens=9))
    assert longer == said(opened(llama, budget="40", max_new_tokens=9), FIRST)[0]
    assert longer[:5] == answer and len(longer) == 9


def test_what_takes_too_much_is_let_go_of_and_read_again(llama: Tiny) -> None:
    talk = opened(llama, budget="40", recall="off", checkpoint_limit="60KB")
    texts = [*WORDS, *WORDS]
    for text in [FIRST, *texts]:
        said(talk, text)
        assert 0 < talk.context.checkpoint_bytes <= 60_000
    told: list[str] = []
    list(talk.edit(2, OTHER, callbacks=Callbacks(notify=told.append)))
    assert any("read again" in note for note in told)
    assert [message["content"] for message in talk.messages[::2]] == [FIRST, OTHER]


def test_there_must_be_something_to_go_back_to(llama: Tiny) -> None:
    talk = opened(llama)
    for act in (talk.undo, lambda: list(talk.regenerate()), lambda: talk.branch(1)):
        with pytest.raises(SettingError, match="nothing has been said yet"):
            act()
    with pytest.raises(SettingError, match="there is nothing to answer"):
        said(talk, "")
    said(talk, FIRST)
    for number in (0, 2):
        with pytest.raises(SettingError, match=f"no message {number}: they are numbered"):
            list(talk.edit(number, OTHER))
    with pytest.raises(SettingError, match="nothing was said since"):
        talk.branch(1)
    with pytest.raises(SettingError, match="no branch 2: there are 1"):
        talk.switch(1)
    with pytest.raises(SettingError, match="--checkpoint-limit 'many' is not a size"):
        opened(llama, checkpoint_limit="many")
    assert len(talk.branches) == 1 and len(talk.messages) == 2
