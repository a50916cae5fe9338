"""An answer checked: from all that was read, and the conversation stands as it did."""

import threading

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvlite.conversation.verify import difference
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import OutOfMemory, SettingError, Stopped
from tests.conftest import Tiny, make_tiny
from tests.contract.talks import (
    FIRST,
    GIVEN,
    LONG,
    SECOND,
    SMALL,
    heard,
    opened,
    said,
    same,
    state,
    untouched,
    whole,
)
from tests.faults import Faults


def test_what_is_gone_is_read_again_and_said_so(llama: Tiny) -> None:
    talk = opened(llama, budget="40", recall="off")
    said(talk, FIRST, SECOND)
    tokens, told = talk.history.branch.tip.prompt_end, list[tuple[int, int]]()
    notes: list[str] = []
    (*_, last) = talk.check(
        callbacks=Callbacks(progress=lambda *at: told.append(at), notify=notes.append)
    )
    assert notes == [f"{tokens} tokens are read again"] and told
    assert last.metrics.prompt_tokens == tokens
    assert last.metrics.kept_entries_mean == last.metrics.seen_tokens


def test_what_one_head_lacks_is_read_again(llama: Tiny) -> None:
    talk = opened(llama, method="full")
    said(talk, FIRST)
    (head_group,) = talk.cache.layers[2].head_groups
    with torch.inference_mode():
        head_group.residual_positions[:, -1, 5] = (
            200  # something answered took the place of what was read
        )
    (*_, last) = talk.check()
    assert last.metrics.prompt_tokens == talk.history.branch.tip.prompt_end


def test_what_was_read_without_looking_at_all_is_read_again(llama: Tiny) -> None:
    talk = opened(llama, method="minference", recall="off")
    said(talk, FIRST)
    assert talk.cache.entries_mean == talk.cache.seen
    (*_, last) = talk.check()
    assert last.metrics.prompt_tokens == talk.history.branch.tip.prompt_end


def test_what_was_rounded_is_said(llama: Tiny) -> None:
    talk, notes = opened(llama, budget="40", recall_bits="4"), list[str]()
    said(talk, FIRST, SECOND)
    (*_, last) = talk.check(callbacks=Callbacks(notify=notes.append))
    (note,) = notes
    assert "kept in 4 bits" in note and "--recall-bits 16" in note and note in last.metrics.notes
    talk = opened(llama, budget="40")
    said(talk, FIRST, SECOND)
    (*_, last) = talk.check(callbacks=Callbacks(notify=notes.append))
    assert len(notes) == 1 and not last.metrics.notes


@pytest.mark.parametrize("recall", ["auto", "off"])
def test_what_was_forgotten_is_said(recall: str) -> None:
    tiny = make_tiny("llama", **SMALL)
    given = {"budget": "40", "beyond_context": "compact", "recall": recall}
    talk, straight = opened(tiny, **given), opened(tiny, **given)
    for each in (talk, straight):
        said(each, FIRST, FIRST, FIRST)
    notes: list[str] = []
    (*_, last) = talk.check(callbacks=Callbacks(notify=notes.append))
    assert any("outgrew" in note for note in notes) and set(last.metrics.notes) & set(notes)
    same(talk, straight)


@pytest.mark.parametrize("name", ["full", "recall", "forget", "four bits"])
def test_however_it_ends_all_is_as_it_was(llama: Tiny, name: str) -> None:
    talk, straight = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    said(talk, FIRST, SECOND)
    said(straight, FIRST, SECOND)
    before, stop = state(talk), threading.Event()
    going = talk.check()
    next(going)
    going.close()  # left in the middle
    untouched(before, state(talk))
    assert (
        len(
            heard(
                piece
                for piece in talk.check(callbacks=Callbacks(cancel=stop))
                if stop.set() is None
            )
        )
        == 2
    )
    with pytest.raises(Stopped):
        list(talk.check(callbacks=Callbacks(cancel=stop)))  # before there was anything
    untouched(before, state(talk))
    with pytest.raises(SettingError, match="temperature"):
        list(talk.check(temperature=-1))
    untouched(before, state(talk))
    same(talk, straight)


@pytest.mark.long
@pytest.mark.parametrize("name", ["full", "recall", "forget"])
def test_memory_that_ends_while_it_is_checked(llama: Tiny, name: str) -> None:
    """Wherever it does: it is told in a sentence, and nothing is lost or given up."""
    talk, straight = opened(llama, **GIVEN[name]), opened(llama, **GIVEN[name])
    said(talk, FIRST, SECOND)
    said(straight, FIRST, SECOND)
    before, ends = state(talk), set()
    with Faults() as counted:
        list(talk.check())
    for at in range(0, counted.count, counted.count // 6):
        try:
            with Faults(range(at, at + 200)):
                (*_, last) = talk.check()
            ends.add(last.metrics.finish_reason)
        except OutOfMemory as error:
            assert "the conversation is kept" in str(error) and "never-lossy" not in str(error)
            ends.add("raised")
        untouched(before, state(talk))
    assert {"raised", "memory"} <= ends
    same(talk, straight)


def test_an_answer_that_goes_on_may_be_checked(llama: Tiny) -> None:
    talk, straight = opened(llama, budget="40"), opened(llama, budget="40")
    said(talk, FIRST)
    expected = said(straight, FIRST, SECOND)[1]
    going = talk.stream(SECOND)
    begun = [next(going).token_id for _ in range(2)]
    checked = heard(talk.check())
    assert checked == whole(llama, talk)
    assert [*begun, *heard(going)] == expected
    same(talk, straight)


def test_it_is_drawn_as_the_answer_was(llama: Tiny) -> None:
    talk = opened(llama, method="full")
    answer = heard(talk.stream(FIRST, temperature=2.0, seed=1, max_new_tokens=9))
    assert len(answer) == 9 and heard(talk.check()) == answer
    assert len(heard(talk.check(max_new_tokens=3))) == 3
    assert heard(talk.check(temperature=0.0)) != answer


def test_what_was_read_ahead_of_the_next_message_is_no_part_of_it(llama: Tiny) -> None:
    talk = opened(llama, budget="40")
    said(talk, FIRST)
    expected = whole(llama, talk)
    assert talk.read_ahead(LONG)
    before = state(talk)
    (*_, last) = pieces = list(talk.check())
    assert [piece.token_id for piece in pieces] == expected and last.metrics.prompt_tokens == 1
    untouched(before, state(talk))
    said(talk, f"{LONG} 5 6")


def test_nothing_to_check(llama: Tiny) -> None:
    with pytest.raises(SettingError, match="nothing has been said yet"):
        list(opened(llama).check())


TEXTS = st.text(st.sampled_from("ab \n.\t"), max_size=30)


@example("", "a").via("nothing")
@example(" a b", "a c ").via("space")
@given(TEXTS, TEXTS)
def test_runs_make_both_texts(one: str, other: str) -> None:
    runs = difference(one, other)
    assert "".join(text for kind, text in runs if kind != "other") == one or not one.split()
    theirs = "".join(f"{text} " for kind, text in runs if kind != "one")
    assert theirs.split() == other.split()
    assert all(text for _, text in runs)
    alike = all(kind == "both" for kind, _ in runs)
    assert alike == (one.split() == other.split()) or not one.split() or not other.split()


def test_what_differs_by_words() -> None:
    assert difference("The cat sat on  the mat.", "The dog sat\non the mat.") == [
        ("both", "The "),
        ("one", "cat "),
        ("other", "dog "),
        ("both", "sat on  the mat."),
    ]
    assert difference("a b", "a b") == [("both", "a b")]
    assert difference("", "") == []
    assert difference("a", "") == [("one", "a")]


@pytest.mark.long
def test_a_model_is_as_it_was(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where memory ends, and weights could have been sent away for it."""
    sent: list[object] = []
    monkeypatch.setattr("kvlite.engine.oom_actions.stream_from_memory", sent.append)
    talk = opened(llama, budget="40", recall="off")
    said(talk, FIRST)
    with Faults(range(40, 400)), pytest.raises(OutOfMemory):
        list(talk.check())
    assert not sent and not talk.context.oom_policy.taken
