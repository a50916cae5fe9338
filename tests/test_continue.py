"""An answer that was stopped goes on."""

import pytest

from kvlite.errors import SettingError
from tests.conftest import Tiny
from tests.contract.talks import FIRST, GIVEN, SECOND, heard, opened, said

GOING_ON = ["full", "recall", "forget", "four bits", "late, by attention"]


@pytest.mark.parametrize("name", GOING_ON)
def test_a_stopped_answer_goes_on(llama: Tiny, name: str) -> None:
    whole, stopped = (opened(llama, max_new_tokens=9, **GIVEN[name]) for _ in range(2))
    (answer,) = said(whole, FIRST)
    first = heard(stopped.stream(FIRST, max_new_tokens=4))
    rest = heard(stopped.continue_answer(max_new_tokens=5))
    assert first == answer[:4] and len(rest) == 5
    said_text = "".join(each["content"] for each in stopped.messages[1:])
    assert said_text == llama.model.tokenizer.decode(first + rest)
    if name == "full":  # others choose anew what stays
        assert first + rest == answer and stopped.messages == whole.messages
        assert said(stopped, SECOND) == said(whole, SECOND)
        stopped.undo()
        assert stopped.messages == whole.messages[:2]
    stopped.undo()
    assert not stopped.messages and not stopped.token_ids


def test_word_by_word_it_is_the_same_answer(llama: Tiny) -> None:
    whole, talk = (opened(llama, method="full") for _ in range(2))
    pieces = talk.stream(FIRST)
    heard_ids = [next(pieces).token_id]
    pieces.close()
    for _ in range(4):
        heard_ids += heard(talk.continue_answer(max_new_tokens=1))
    assert heard_ids == said(whole, FIRST)[0]
    assert talk.messages == whole.messages
    assert heard(talk.regenerate()) == heard_ids


def test_what_has_ended_does_not_go_on(llama: Tiny) -> None:
    talk = opened(llama)
    with pytest.raises(SettingError, match="nothing has been said yet"):
        list(talk.continue_answer())
    said(talk, FIRST)
    assert talk.context.turn is not None
    talk.context.turn.pending_ids = [next(iter(llama.model.stop_ids))]
    with pytest.raises(SettingError, match="the last answer has ended"):
        list(talk.continue_answer())
