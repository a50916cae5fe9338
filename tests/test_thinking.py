"""Reasoning in conversations: what is counted and kept of it, where it goes on, and its switch."""

from pathlib import Path

import pytest

import kvlite
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.session import Session
from kvlite.conversation.together import ask_all
from kvlite.engine.callbacks import NO_CALLBACKS
from tests.thoughts import ANSWER, LARK, SAID, STUBBORN, THOUGHT, speak, thinking_model


@pytest.fixture(scope="module")
def thinker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> kvlite.Runner:
    folder = thinking_model(tmp_path_factory.mktemp("thinker"), tiny_folder)
    return kvlite.load(str(folder), method="full")


@pytest.fixture(scope="module")
def stubborn(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> kvlite.Runner:
    folder = thinking_model(tmp_path_factory.mktemp("stubborn"), tiny_folder, STUBBORN)
    return kvlite.load(str(folder))


def tokens(runner: kvlite.Runner, text: str) -> int:
    return len(runner.tokenizer.encode(text, add_special_tokens=False))


def joined(pieces: list[Piece]) -> tuple[str, str]:
    return "".join(each.reasoning for each in pieces), "".join(each.text for each in pieces)


def test_reasoning_is_counted_as_it_comes_and_kept(thinker: kvlite.Runner, tmp_path: Path) -> None:
    talk = thinker.conversation(schema=LARK)
    pieces = [*talk.stream("Two and two?")]
    assert joined(pieces) == (THOUGHT, SAID)
    counts = [each.metrics.reasoning_tokens for each in pieces]
    assert counts == sorted(counts) and counts[1] == 2 and counts[-1] == counts[-2]
    whole = tokens(thinker, f"{THOUGHT}\n</think>")
    assert abs(counts[-1] - whole) <= 1 < counts[-1] < len(pieces)
    last = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}
    assert talk.messages[-1] == last | {"reasoning_tokens": counts[-1]}
    talk.save(tmp_path / "talk.kv")
    assert thinker.open(tmp_path / "talk.kv").messages == talk.messages
    (check,) = [joined([*talk.check(schema=LARK)])]
    assert check == (THOUGHT, SAID)
    session = Session(thinker, thinker.settings)
    session.resume(talk)
    assert SAID in session.markdown() and "Two and" not in session.markdown().partition("Model")[2]


@pytest.mark.parametrize("most", [1, 3, 5, 7, 16])
def test_what_was_cut_within_reasoning_goes_on_there(
    thinker: kvlite.Runner, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    speak(monkeypatch, thinker.tokenizer, ANSWER)
    whole = thinker.conversation()
    joined([*whole.stream("Two and two?")])
    speak(monkeypatch, thinker.tokenizer, ANSWER)
    talk = thinker.conversation()
    pieces = [*talk.stream("Two and two?", max_new_tokens=most)]
    assert pieces[-1].metrics.finish_reason == "length" and pieces[-1].text == ""
    assert pieces[-1].metrics.reasoning_tokens == most
    while pieces[-1].metrics.finish_reason == "length":
        pieces = [*talk.continue_answer(max_new_tokens=most)]
    assert talk.messages == whole.messages


@pytest.mark.parametrize(("later", "most"), [(9, 9), (7, 7), (3, 5)])
def test_a_limit_of_reasoning_counts_what_came_before_it_was_continued(
    thinker: kvlite.Runner, monkeypatch: pytest.MonkeyPatch, later: int, most: int
) -> None:
    left = speak(monkeypatch, thinker.tokenizer, ANSWER)
    end = thinker.tokenizer.convert_tokens_to_ids("</think>")
    talk = thinker.conversation(reasoning_budget=9)
    joined([*talk.stream("Two and two?", max_new_tokens=5)])
    talk.settings = talk.settings.replace({"reasoning_budget": later})
    ids = list[int]()
    for piece in talk.continue_answer(max_new_tokens=30):
        ids.append(piece.token_id or 0)
        if piece.token_id == end and len(ids) < 9:
            del left[: left.index(end) + 1]
    assert ids.index(end) == most - 5
    assert talk.messages[-1]["content"] == SAID
    assert talk.messages[-1]["reasoning_tokens"] == most + 1


def test_a_switch_that_is_missing_is_named_once(
    thinker: kvlite.Runner, stubborn: kvlite.Runner
) -> None:
    def noted(talk: Conversation) -> list[str]:
        notes = [*talk.stream("Hm?", max_new_tokens=1)][-1].metrics.notes
        return [each for each in notes if "--thinking" in each]

    assert thinker.model.has_switch and not stubborn.model.has_switch
    talk = stubborn.conversation(thinking="off")
    assert (
        len(noted(talk)) == 1
        and "--thinking off" in noted(stubborn.conversation(thinking="off"))[0]
    )
    assert noted(talk) == []
    talk.settings = talk.settings.replace({"thinking": "on"})
    assert "--thinking on" in noted(talk)[0]
    assert noted(stubborn.conversation()) == [] == noted(thinker.conversation(thinking="off"))


def test_the_switch_is_told_the_template(thinker: kvlite.Runner) -> None:
    talk = thinker.conversation(thinking="off", schema='start: "Four."')
    assert joined([*talk.stream("Two and two?")]) == ("", "Four.")
    assert "reasoning_content" not in talk.messages[-1]
    talk.settings = talk.settings.replace({"thinking": "auto"})
    assert joined([*talk.edit(1, "And two?", thinking="off")]) == ("", "Four.")
    rows = [("Two?", {"thinking": each, "max_new_tokens": 3}) for each in ("off", "on")]
    heard = [*ask_all([(thinker.conversation(), talk.config, rows)], NO_CALLBACKS)]
    last = {at: piece for at, piece in heard if isinstance(piece, Piece)}
    assert [last[row].metrics.reasoning_tokens for row in (0, 1)] == [0, 3]
