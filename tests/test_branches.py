"""Going back in a conversation: what follows is as if nothing else had ever been said."""

import threading
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvlite
from kvlite.config.settings import Settings
from kvlite.conversation.context import Context
from kvlite.conversation.conversation import Conversation
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError, Stopped
from kvlite.methods import METHODS
from tests.conftest import Tiny, make_tiny

LONG = " ".join(str(3 + 7 * i % 190) for i in range(90))
FIRST, SECOND, THIRD = f"{LONG} 11 12 13", "21 22 23 24", "31 32 33"
OTHER = "41 42 43 44 45 46"

GIVEN: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "recall": {"budget": "40"},
    "recall-8": {"budget": "40", "recall_bits": "8"},
    "recall-4": {"budget": "40", "recall_bits": "4"},
    "recall-disk": {"budget": "40", "recall": "disk"},
    "forget": {"budget": "40", "recall": "off"},
    "four bits": {"kv_bits": "4g32", "recall": "off"},
    "four bits recalled": {"kv_bits": "4g32", "budget": "50"},
    "late": {"budget": "106"},
    "late, forgotten": {"budget": "106", "recall": "off"},
    "late, by attention": {"method": "h2o", "budget": "106", "recall": "off"},
    "late, by attention, recalled": {"method": "h2o", "budget": "106"},
    "settled by a step": {
        "method": "simlayerkv:threshold=0.3,recent=20,detect=decode",
        "budget": "500",
        "recall": "off",
    },
    "late, rounded": {"budget": "106", "recall_bits": "4"},
}
GIVEN |= {
    f"{name}, forgotten": {"method": name, "budget": "60", "recall": "off"} for name in METHODS
}
GIVEN |= {
    name: {"method": name, "budget": "60"}
    for name in METHODS
    if METHODS[name]().prefilling.mask is None and METHODS[name]().compresses
}


def opened(tiny: Tiny, **given: Any) -> Conversation:
    base = {"max_new_tokens": 5, "stop": ("no such text",)}
    return kvlite.Runner(tiny.model, Settings().replace(base | given)).conversation()


def said(talk: Conversation, *texts: str) -> list[list[int]]:
    return [heard(talk.stream(text)) for text in texts]


def heard(pieces: Iterator[Any]) -> list[int]:
    return [piece.token_id for piece in pieces]


def entries(talk: Conversation) -> list[list[tuple[Tensor, ...]]]:
    """What every head of every layer holds, in order of positions."""
    found = []
    for layer in talk.cache.layers:
        heads: dict[int, tuple[Tensor, ...]] = {}
        for head_group in layer.head_groups:
            order = head_group.positions[0, :, : head_group.used].argsort(-1)
            for row, head in enumerate(head_group.heads):
                picked = order[row]
                held = [
                    each[0, row, picked]
                    for each in (head_group.positions, head_group.keys, head_group.values)
                ]
                if head_group.rows is not None:
                    held.append(head_group.rows[0, row][:, picked])
                heads[head] = tuple(held)
        found.append([heads[head] for head in sorted(heads)])
    return found


def refused(*_: Any) -> None:
    raise AssertionError("something is read again")


def same(one: Conversation, two: Conversation) -> None:
    """Both stand alike, bit by bit, and go on alike."""
    assert one.messages == two.messages
    assert [*one.token_ids, *one.context.pending_ids] == [*two.token_ids, *two.context.pending_ids]
    for mine, theirs in zip(entries(one), entries(two), strict=True):
        for held, expected in zip(mine, theirs, strict=True):
            assert all(a.equal(b) for a, b in zip(held, expected, strict=True))
    assert said(one, THIRD) == said(two, THIRD)
    assert one.messages == two.messages


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", GIVEN)
def test_an_edit_is_as_if_nothing_else_had_been_said(llama: Tiny, name: str) -> None:
    talk, fresh = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    said(talk, FIRST, SECOND, THIRD)
    left, told = [*talk.messages], list[str]()
    edited = heard(talk.edit(2, OTHER, callbacks=Callbacks(notify=told.append)))
    assert not [note for note in told if "read again" in note]
    assert said(fresh, FIRST, OTHER)[1] == edited
    assert talk.branches[0].messages == left and talk.branches[1].current
    same(talk, fresh)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", GIVEN)
def test_an_answer_drawn_again_is_the_same(
    llama: Tiny, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, fresh = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    (_, answer), (_, expected) = said(talk, FIRST, SECOND), said(fresh, FIRST, SECOND)
    with monkeypatch.context() as patched:
        patched.setattr(Context, "read", refused)
        assert heard(talk.regenerate()) == answer == expected
    assert talk.branches[0].messages == talk.messages and talk.branches[1].current
    same(talk, fresh)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", GIVEN)
def test_undone_is_unsaid(llama: Tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, fresh = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    said(talk, FIRST, SECOND, THIRD)
    with monkeypatch.context() as patched:
        patched.setattr(Context, "read", refused)
        assert talk.undo() == THIRD and talk.undo() == SECOND
    assert len(talk.branches) == 1
    said(fresh, FIRST)
    said(talk, OTHER)
    said(fresh, OTHER)
    same(talk, fresh)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", [*GIVEN][::2])
def test_a_branch_goes_on_from_an_earlier_answer(llama: Tiny, name: str) -> None:
    talk, fresh = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    said(talk, FIRST, SECOND, THIRD)
    left = [*talk.messages]
    talk.branch(1)
    assert talk.messages == left[:2]
    said(talk, OTHER)
    said(fresh, FIRST, OTHER)
    assert [branch.messages for branch in talk.branches] == [left, talk.messages]
    same(talk, fresh)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", [*GIVEN][1::2])
def test_a_branch_that_was_left_goes_on_where_it_ended(llama: Tiny, name: str) -> None:
    talk, fresh = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    said(talk, FIRST, SECOND)
    list(talk.edit(2, OTHER))
    talk.switch(0)
    said(fresh, FIRST, SECOND)
    assert talk.messages == fresh.messages and talk.branches[0].current
    assert talk.token_ids + talk.context.pending_ids == fresh.token_ids + fresh.context.pending_ids
    assert said(talk, THIRD) == said(fresh, THIRD)
    talk.switch(1)
    assert talk.messages[2]["content"] == OTHER


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "architecture", ["gemma3", "qwen2-sliding", "phi3-longrope", "mixtral", "gpt-oss", "llama4"]
)
@pytest.mark.parametrize(
    "name", ["full", "recall", "recall-4", "forget", "late", "late, forgotten"]
)
def test_sliding_windows_go_back_too(architecture: str, name: str) -> None:
    tiny = make_tiny(architecture)
    talk, fresh = opened(tiny, **GIVEN[name]), opened(tiny, **GIVEN[name])
    said(talk, FIRST, SECOND, THIRD)
    told: list[str] = []
    list(talk.edit(2, OTHER, callbacks=Callbacks(notify=told.append)))
    said(fresh, FIRST, OTHER)
    assert not [note for note in told if "read again" in note]
    same(talk, fresh)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["say", "say", "regenerate", "edit", "undo", "branch", "switch"]),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=9,
)
WORDS = [f"{20 + word} {50 + word} {80 + 3 * word}" for word in range(6)]


def act_on(talk: Conversation, act: str, number: int, word: int) -> None:
    """One of `STEPS`, as far as there is something to do it to."""
    turns, branches = len(talk.messages) // 2, len(talk.branches)
    if act == "say" or not turns:
        said(talk, WORDS[word])
    elif act == "regenerate":
        list(talk.regenerate())
    elif act == "edit":
        list(talk.edit(1 + number % turns, WORDS[word]))
    elif act == "undo":
        talk.undo()
    elif act == "branch" and turns > 1:
        talk.branch(1 + number % (turns - 1))
    elif act == "switch":
        talk.switch(number % branches)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(STEPS, st.sampled_from(["full", "recall", "recall-4", "late"]), st.booleans())
def test_whatever_was_done_before_it_goes_on_as_said(
    steps: list[tuple[str, int, int]], name: str, forgets: bool
) -> None:
    tiny = llama_once()
    chosen = GIVEN[name] | ({"checkpoint_limit": "0MB"} if forgets else {})
    talk, fresh = opened(tiny, **chosen), opened(tiny, **GIVEN[name])
    said(talk, FIRST)
    for act, number, word in steps:
        act_on(talk, act, number, word)
    texts = [message["content"] for message in talk.messages if message["role"] == "user"]
    said(fresh, *texts)
    assert talk.messages == fresh.messages
    assert said(talk, THIRD) == said(fresh, THIRD)
    if forgets:
        assert talk.context.checkpoint_bytes == 0


@cache
def llama_once() -> Tiny:
    return make_tiny("llama")


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


def test_undone_it_can_be_asked_otherwise_about_what_was_read(llama: Tiny) -> None:
    talk, fresh = opened(llama, budget="40"), opened(llama, budget="40")
    for each in (talk, fresh):
        each.read_ahead(LONG)
    said(talk, f"{LONG} 5 6 7")
    talk.undo()
    said(talk, f"{LONG} 8 9")
    said(fresh, f"{LONG} 8 9")
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


def acts(talk: Conversation, told: list[str]) -> list[Any]:
    """Everything that goes back, one after the other."""
    edited = heard(talk.edit(2, OTHER, callbacks=Callbacks(notify=told.append)))
    again = heard(talk.regenerate(callbacks=Callbacks(notify=told.append)))
    undone = [talk.undo(), *said(talk, THIRD)]
    talk.branch(1)
    branched = said(talk, WORDS[0])
    talk.switch(0, callbacks=Callbacks(notify=told.append))
    messages = [branch.messages for branch in talk.branches]
    return [edited, again, undone, branched, messages, said(talk, WORDS[1])]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["full", "recall", "recall-4", "recall-disk", "late"])
def test_saved_conversations_go_back_as_others_do(llama: Tiny, name: str, tmp_path: Path) -> None:
    talk, straight = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    for each in (talk, straight):
        said(each, FIRST, SECOND, THIRD)
        list(each.edit(3, WORDS[2]))
    talk.save(tmp_path / "talk.kv")
    runner = kvlite.Runner(llama.model, Settings())
    talk = runner.open(tmp_path / "talk.kv")
    assert [branch.messages for branch in talk.branches] == [
        branch.messages for branch in straight.branches
    ]
    told: list[str] = []
    list(talk.edit(2, WORDS[3], callbacks=Callbacks(notify=told.append)))
    list(straight.edit(2, WORDS[3]))
    assert bool(told) == (name == "recall-4")
    assert acts(talk, []) == acts(straight, [])
