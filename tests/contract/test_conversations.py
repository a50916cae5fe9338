"""The contract of a conversation: whatever was done before, it stands and goes on as one that was
never told anything else; in files, too, and an answer may be checked at any time."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlite import Callbacks, Conversation
from kvlite.conversation.context import Context
from tests.conftest import HYBRIDS, make_tiny

from .talks import (
    ALIKE,
    FIRST,
    GIVEN,
    KINDS_OF_HOLDING,
    OTHER,
    RECALLED,
    SECOND,
    THIRD,
    WORDS,
    again,
    gone_ways,
    heard,
    llama_once,
    opened,
    refused,
    said,
    same,
    state,
    untouched,
    whole,
)

SLIDING = ["gemma3", "qwen2-sliding", "phi3-longrope", "mixtral", "gpt-oss", "llama4"]
MODELS = [*SLIDING, "gemma3n", "gemma4", "gemma4-e", *HYBRIDS]
# Kinds of holding, with a Llama; and some of them with every kind of model.
HELD = [("llama", name) for name in GIVEN]
HELD += [
    (model, name)
    for model in MODELS
    for name in ("full", "recall", "recall-4", "forget", "late, forgotten")
]


def never_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Context, "read", refused)


@pytest.mark.cases(8, 60)
@pytest.mark.parametrize(("model", "name"), HELD)
def test_going_back_is_as_if_nothing_else_had_been_said(model: str, name: str) -> None:
    tiny = llama_once() if model == "llama" else make_tiny(model)
    talk, fresh, straight, undone, branched = (opened(tiny, **GIVEN[name]) for _ in range(5))
    said(talk, FIRST, SECOND, THIRD)
    left, told = [*talk.messages], list[str]()
    edited = heard(talk.edit(2, OTHER, callbacks=Callbacks(notify=told.append)))
    assert not [note for note in told if "read again" in note]
    assert said(fresh, FIRST, OTHER)[1] == edited
    assert talk.branches[0].messages == left and talk.branches[1].current
    with pytest.MonkeyPatch.context() as patch:
        never_read(patch)
        assert heard(talk.regenerate()) == edited
    same(talk, fresh)

    with pytest.MonkeyPatch.context() as patch:
        never_read(patch)
        assert talk.undo() == THIRD and talk.undo() == OTHER
    assert talk.branches[0].messages == left
    said(talk, WORDS[1])
    said(undone, FIRST, WORDS[1])
    same(talk, undone)

    talk.switch(0)
    said(straight, FIRST, SECOND, THIRD)
    assert talk.messages == straight.messages == left and talk.branches[0].current
    assert talk.token_ids + talk.context.pending_ids == (
        straight.token_ids + straight.context.pending_ids
    )
    assert said(talk, WORDS[2]) == said(straight, WORDS[2])

    talk.branch(1)
    assert talk.messages == left[:2]
    said(talk, WORDS[3])
    said(branched, FIRST, WORDS[3])
    same(talk, branched)


def goes_on_alike(talk: Conversation, straight: Conversation) -> None:
    """Through everything that goes back."""
    assert talk.branches == straight.branches
    for each in (talk, straight):
        list(each.edit(2, OTHER))
        list(each.regenerate())
        assert each.undo() == OTHER
        said(each, THIRD)
        each.branch(1)
        said(each, WORDS[0])
        each.switch(0)
        said(each, WORDS[1])
    assert talk.branches == straight.branches


@pytest.mark.cases(5, 40)
@pytest.mark.parametrize(("model", "name"), HELD)
def test_a_conversation_in_a_file_goes_on_as_if_it_had_not_been(
    model: str, name: str, tmp_path: Path
) -> None:
    tiny, path = llama_once() if model == "llama" else make_tiny(model), tmp_path / "talk.kv"
    talk, straight = gone_ways(tiny, **GIVEN[name]), gone_ways(tiny, **GIVEN[name])
    talk.save(path)
    reopened = again(tiny, path)
    assert said(reopened, WORDS[5]) == said(talk, WORDS[5]) == said(straight, WORDS[5])
    if model == "llama":
        same(reopened, straight)
        if name in RECALLED or name in ALIKE:  # else copies are needed, which a file has not
            goes_on_alike(reopened, straight)


@pytest.mark.cases(5, 36)
@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, name in HELD if model not in HYBRIDS]
)
def test_a_light_file_is_read_again_and_goes_on(model: str, name: str, tmp_path: Path) -> None:
    """Bit by bit with recall. Where nothing was dropped, alike; else as a branch that is."""
    tiny, path = llama_once() if model == "llama" else make_tiny(model), tmp_path / "talk.kv"
    if name not in RECALLED and name not in ALIKE:
        talk = opened(tiny, checkpoint_limit="0MB", **GIVEN[name])
        said(talk, FIRST, SECOND)
        list(talk.edit(1, OTHER))
        talk.switch(0)
        talk.save(path, light=True)
        reopened = again(tiny, path)
        assert reopened.token_ids == talk.token_ids
        same(reopened, talk)
        return
    talk, straight = gone_ways(tiny, **GIVEN[name]), gone_ways(tiny, **GIVEN[name])
    talk.save(path, light=True)
    reopened = again(tiny, path)
    assert reopened.branches == straight.branches
    assert said(reopened, WORDS[5]) == said(straight, WORDS[5])
    if name in RECALLED and model == "llama":
        same(reopened, straight)
    goes_on_alike(reopened, straight)


@pytest.mark.cases(6, 36)
@pytest.mark.parametrize(
    ("model", "name"),
    [("llama", name) for name in KINDS_OF_HOLDING]
    + [(model, name) for model in SLIDING for name in ("full", "recall", "forget", "late")],
)
def test_a_check_answers_from_everything_and_changes_nothing(model: str, name: str) -> None:
    """With recall one token is computed for it."""
    tiny = llama_once() if model == "llama" else make_tiny(model)
    talk, straight = opened(tiny, **GIVEN[name]), opened(tiny, **GIVEN[name])
    said(talk, FIRST, SECOND)
    said(straight, FIRST, SECOND)
    before, expected = state(talk), whole(tiny, talk)
    pieces = list(talk.check())
    untouched(before, state(talk))
    metrics = pieces[-1].metrics
    assert any(tiny.model.shape.windows) or metrics.kept_entries_mean == metrics.seen_tokens
    assert metrics.method == "full" and metrics.kv_bits == "16"
    assert not metrics.recalled_bytes and not metrics.host_kv_bytes
    if "4" not in GIVEN[name].get("recall_bits", "16"):
        assert [piece.token_id for piece in pieces] == expected
    if name in (*RECALLED, "full", "late"):  # but for what does not read all in every layer
        assert (metrics.prompt_tokens == 1) == (name != "pyramidinfer")
    with pytest.MonkeyPatch.context() as patch:
        never_read(patch)
        assert heard(talk.regenerate()) == heard(straight.regenerate())
    same(talk, straight)


ACTS = st.tuples(
    st.sampled_from(["say", "say", "regenerate", "edit", "undo", "branch", "switch", "check"]),
    st.integers(0, 5),
    st.integers(0, 5),
)


def act_on(talk: Conversation, act: str, number: int, word: int) -> None:
    """One of `ACTS`, as far as there is something to do it to."""
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
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(ACTS, max_size=9),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(["full", "recall", "recall-4", "late", "forget"]),
    st.booleans(),
)
def test_whatever_was_done_before_it_goes_on_as_said(
    tmp_path: Path,
    acts: list[tuple[str, int, int]],
    saves: list[int],
    name: str,
    forgets: bool,
) -> None:
    """Whenever it is saved light and opened, and checked; also where no copies are kept."""
    tiny = llama_once()
    chosen = GIVEN[name] | ({"checkpoint_limit": "0MB"} if forgets else {})
    talk, fresh = opened(tiny, **chosen), opened(tiny, **GIVEN[name])
    said(talk, FIRST)
    for at, (act, number, word) in enumerate([*acts, ("say", 0, 0)]):
        if at in saves and name != "forget":
            talk.save(tmp_path / "talk.kv", light=True)
            before = talk.branches, talk.token_ids
            talk = again(tiny, tmp_path / "talk.kv")
            assert (talk.branches, talk.token_ids) == before
        if act == "check":
            if talk.messages:
                stood, expected = state(talk), whole(tiny, talk)
                answer = heard(talk.check())
                assert answer == expected or name == "recall-4"
                untouched(stood, state(talk))
            continue
        act_on(talk, act, number, word)
    texts = [message["content"] for message in talk.messages if message["role"] == "user"]
    said(fresh, *texts)
    assert talk.messages == fresh.messages
    assert said(talk, THIRD) == said(fresh, THIRD)
    if forgets:
        assert talk.context.checkpoint_bytes == 0 or saves
