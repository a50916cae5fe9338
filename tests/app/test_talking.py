"""What a page is told by each event, whatever comes in between."""

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr
import pytest

from kvlite.config.settings import Settings
from kvlite.conversation.session import Session
from kvlite.errors import SettingError
from kvlite_app.engine.going import NOTHING, Going, Sent
from kvlite_app.engine.service import Service
from kvlite_app.engine.work import Work
from kvlite_app.form import Models
from kvlite_app.keeping.shelf import Shelf
from kvlite_app.layout import lay_out
from kvlite_app.showing import BEGUN, ENDED
from kvlite_app.talking import Talking
from kvlite_app.visit import Visit, visit_of
from tests.app.conftest import upload
from tests.app.test_service import A, B, blocked, no_room, stops

TAB: Any = gr.Request(session_hash="tab")


@pytest.fixture
def talking(tiny_folder: Path, tmp_path: Path) -> Iterator[Talking]:
    settings = Settings(model=str(tiny_folder), max_new_tokens=4)
    service = Service(settings, tmp_path)
    with gr.Blocks(analytics_enabled=False):
        yield Talking(service, lay_out(settings, Models()))
    service.close()


def said(text: str, *files: str) -> dict[str, Any]:
    return {"text": text, "files": [*files]}


def box(talking: Talking, view: dict[Any, Any]) -> dict[str, Any]:
    """What a view changes of the box."""
    return dict(view[talking.parts.box]._constructor_args[0])


def followed(talking: Talking, id: str) -> list[dict[Any, Any]]:
    return [*talking.follow(id, 0, BEGUN, TAB)]


def ended(talking: Talking, id: str) -> None:
    """Wait until nothing is done for a conversation any more."""
    going = talking.service.going("", id)
    assert going is not None
    for _ in going.work.follow():
        pass


@pytest.mark.long
def test_what_is_sent_is_followed_to_its_end(talking: Talking) -> None:
    parts = talking.parts
    begun = talking.say(A, 0, "", said("One."), TAB)
    assert (begun[parts.stage], begun[parts.here]) == (BEGUN, A)
    assert box(talking, begun)["value"] is None
    *_, last = followed(talking, A)
    assert last == {parts.stage: ENDED}
    view = talking.ended(A, 0, ENDED, said(""), TAB)
    assert [each["role"] for each in view[parts.chat]] == ["user", "assistant", "assistant"]
    assert "value" not in box(talking, view)
    # One that was told of another stage shows nothing.
    assert parts.chat not in talking.ended(A, 0, BEGUN, said(""), TAB)
    assert parts.stage not in [*talking.follow(A, 0, "", TAB)][-1]


@pytest.mark.long
def test_who_chose_another_conversation_meanwhile_has_that_one(
    talking: Talking, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, say = talking.parts, talking.service.say

    def chosen(owner: str, id: str, text: str, files: Any = ()) -> Any:
        talking.show(B, "", A, said(text), TAB)
        if text == "refused":
            raise SettingError("no")
        return say(owner, id, text, files)

    talking.service.say("", B, "One.").wait()
    monkeypatch.setattr(talking.service, "say", chosen)
    go = blocked(talking.service)
    assert parts.here not in talking.say(A, 0, "", said("One."), TAB)
    assert parts.stage not in followed(talking, A)[-1]
    assert parts.here not in talking.ended(A, 0, ENDED, said(""), TAB)
    go.set()
    ended(talking, A)
    assert parts.here not in talking.say(A, 0, "", said("refused"), TAB)
    assert talking.ended(B, 0, ENDED, said(""), TAB)[parts.here] == B


@pytest.mark.long
def test_whoever_is_quicker_than_the_page_begins_a_conversation(talking: Talking) -> None:
    parts = talking.parts
    talking.service.say("", A, "One.").wait()
    begun = talking.say("", 0, "", said("Hello."), TAB)
    id = begun[parts.here]
    assert id not in ("", A) and begun[parts.stage] == BEGUN
    assert parts.here not in talking.load(A, "", TAB)  # which comes too late
    ended(talking, id)
    assert talking.service.record("", id).said[0].text == "Hello."
    other: Any = gr.Request(session_hash="other")
    assert talking.load(A, "", other)[parts.here] == A


@pytest.mark.long
def test_only_what_is_sent_leaves_the_box(
    talking: Talking, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking.service.say("", A, "One.").wait()
    assert "value" not in box(talking, talking.regenerate(A, 0, TAB))
    followed(talking, A)
    go = blocked(talking.service)
    talking.regenerate(A, 0, TAB)
    assert "value" not in box(talking, talking.show(A, "", "", None, TAB))
    go.set()
    followed(talking, A)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "say", stops)
        talking.say(A, 0, "", said("An older one."), TAB)
        ended(talking, A)
    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "save", no_room)
        refused = talking.say(A, 0, "", said("Two."), TAB)
    assert "value" not in box(talking, refused)
    assert "not sent" in refused[talking.parts.status]


@pytest.mark.long
def test_a_message_without_an_answer_is_in_the_box_again_with_its_files(
    talking: Talking, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (upload(talking.service, name, b"nothing") for name in ("a.txt", "b.pdf"))
    talking.say(A, 0, "", said("What is in it?", good, bad), TAB)
    followed(talking, A)
    view = talking.ended(A, 0, ENDED, said(""), TAB)
    assert box(talking, view)["value"] == said("What is in it?", good)
    assert "b.pdf" in view[talking.parts.status]
    assert talking.service.shelf("").records() == []  # nothing was said
    monkeypatch.setattr(Session, "say", stops)
    talking.say(A, 0, "", said("And without?"), TAB)
    followed(talking, A)
    assert box(talking, talking.show(A, "", "", None, TAB))["value"] == said("And without?")


@pytest.mark.long
def test_a_message_stays_with_its_conversation_and_what_is_typed_with_the_box(
    talking: Talking, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking.service.say("", B, "One.").wait()
    monkeypatch.setattr(Session, "say", stops)
    talking.say(A, 0, "", said("Two."), TAB)
    ended(talking, A)
    assert box(talking, talking.show(B, "", A, said("Two. "), TAB))["value"] is None
    assert box(talking, talking.show("", "", A, said("Two."), TAB))["value"] is None
    assert "value" not in box(talking, talking.show(B, "", A, said("Three."), TAB))
    assert "value" not in box(talking, talking.show(B, "", B, said("Two."), TAB))
    assert box(talking, talking.show(A, "", B, said(""), TAB))["value"] == said("Two.")


@pytest.mark.long
def test_a_branch_that_is_gone_to_is_told_of_once(talking: Talking) -> None:
    talking.service.say("", A, "One.").wait()
    talking.service.edit("", A, 1, "Another.").wait()
    go = blocked(talking.service)
    assert talking.switch(A, 0, 1, TAB)[talking.parts.stage] == BEGUN
    with warnings.catch_warnings():  # gradio's own, of which there is none
        warnings.simplefilter("error")
        assert talking.parts.stage not in talking.switch(A, 0, 1, TAB)
    go.set()
    ended(talking, A)


@pytest.mark.long
def test_a_branch_that_cannot_be_gone_to_yet_is_not_shown_as_chosen(talking: Talking) -> None:
    talking.service.say("", A, "One.").wait()
    for text in ("Another.", "A third."):
        talking.service.edit("", A, 1, text).wait()
    go = blocked(talking.service)
    talking.switch(A, 0, 1, TAB)
    with pytest.warns(UserWarning, match="an answer is on its way"):
        refused = talking.switch(A, 0, 2, TAB)
    assert refused[talking.parts.branches]["value"] == 1
    go.set()
    ended(talking, A)
    record = talking.service.record("", A)
    assert record.branch == 1
    assert record.elsewhere[0] == "Another."
    assert "One." not in record.elsewhere
    assert talking.service.shelf("").records("third")  # found wherever it was said


@pytest.mark.long
@pytest.mark.parametrize("sent", [NOTHING, Sent("Two.")], ids=["check", "message"])
def test_a_check_is_not_shown_as_an_answer(talking: Talking, sent: Sent) -> None:
    talking.service.say("", A, "One.").wait()
    work = Work(lambda work: None, "")
    work.show(text="Answer")
    visit = visit_of(TAB, A)
    coming = next(talking._coming(visit, Going(work, sent), Event()))[talking.parts.chat]
    assert (coming[-1]["content"] == "Answer") == (sent is not NOTHING)


def test_what_cannot_be_read_any_more_leaves_nobody_waiting(talking: Talking) -> None:
    talking.service.say("", A, "One.").wait()
    go = blocked(talking.service)
    talking.say(A, 0, "", said("Two."), TAB)
    (talking.service.shelf("").place(A) / "record.json").write_text("{")
    assert [*talking.follow(A, 0, BEGUN, TAB)][-1] == {talking.parts.stage: ENDED}
    view = talking.ended(A, 0, ENDED, said(""), TAB)
    assert "cannot be read" in view[talking.parts.status]
    assert box(talking, view) == {"submit_btn": True, "stop_btn": False}
    go.set()
    ended(talking, A)


def test_what_is_typed_stays_whatever_was_not_answered(talking: Talking) -> None:
    shelf, typed = talking.service.shelf(""), said("Typed meanwhile.")
    for id in (A, B):
        shelf.keep_draft(id, f"Not answered {id[0]}")
    assert box(talking, talking.show(A, "", "", said(""), TAB))["value"]["text"]
    assert "value" not in box(talking, talking.show(B, "", A, typed, TAB))
    # What is kept with the one that was shown makes room for what the other one has.
    kept = said(shelf.record(A).draft)
    assert box(talking, talking.show(B, "", A, kept, TAB))["value"] == said(shelf.record(B).draft)
    assert "value" not in box(talking, talking.ended(B, 0, ENDED, typed, TAB))


@pytest.mark.long
def test_around_a_conversation_stands_what_is_its_own_while_it_answers(talking: Talking) -> None:
    parts, service = talking.parts, talking.service
    for id, text in ((A, "One."), (B, "Two.")):
        service.say("", id, text).wait()
    go = blocked(service)
    service.say("", B, "And more?")
    talking.show(A, "", "", said(""), TAB)
    view = talking.show(B, "", A, said(""), TAB)
    assert view[parts.stage] == BEGUN
    assert (view[parts.name], view[parts.chosen], view[parts.difference]) == ("Two.", 1, "")
    assert "Answer to “Two.”" in view[parts.answer]
    go.set()
    ended(talking, B)


@pytest.mark.long
def test_a_check_is_ended_alone_and_what_it_came_to_is_found_again(talking: Talking) -> None:
    parts, service = talking.parts, talking.service
    service.say("", A, "One.").wait()
    talking.show(A, "", "", said(""), TAB)
    go, told = blocked(service), talking.check(A, TAB)
    assert "doing" in next(told)
    talking.stop_check(B, TAB)
    left = threading.Thread(target=lambda: talking.show(B, "", A, said(""), TAB))
    left.start()
    assert [*told][-1] == gr.skip()  # nothing of it is shown beside another conversation
    left.join(60)
    go.set()
    ended(talking, A)
    assert "The same answer" in talking.show(A, "", B, said(""), TAB)[parts.difference]
    service.say("", A, "Two.").wait()
    assert talking.show(A, "", A, said(""), TAB)[parts.difference] == ""

    go = blocked(service)
    told = talking.check(A, TAB)
    next(told)
    talking.stop_check(A, TAB)
    go.set()
    ended(talking, A)
    assert "checked" not in [*told][-1]
    service.say("", A, "Three.")
    talking.stop_check(A, TAB)  # which ends no answer
    ended(talking, A)
    assert len(service.record("", A).said) == 6


@pytest.mark.long
def test_what_comes_late_is_not_shown_beside_another_conversation(talking: Talking) -> None:
    parts, event = talking.parts, gr.SelectData(None, {"index": 0, "value": ""})
    for id in (A, B):
        talking.service.say("", id, "One.").wait()
    talking.show(B, "", "", said(""), TAB)
    assert parts.chat not in talking.show_all(A, TAB)
    assert parts.chat in talking.show_all(B, TAB)
    assert talking.choose(A, 0, event, TAB)[0] == gr.skip()
    assert talking.choose(B, 0, event, TAB)[0] == 1
    assert parts.here not in talking.say(A, 0, "", said(""), TAB)
    assert parts.here not in talking.delete(A, "", said(""), TAB)
    assert not talking.service.shelf("").has(A)
    assert talking.delete(B, "", said(""), TAB)[parts.here] not in (A, B)


@pytest.mark.long
def test_one_answer_after_another_is_followed(
    talking: Talking, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, coming, again = talking.service, talking._coming, list[Work]()

    def at_once(visit: Visit, going: Going, left: Event) -> Iterator[Any]:
        """A program says the next thing as soon as it has its answer."""
        yield from coming(visit, going, left)
        if not again:
            going.work.wait()
            again.append(service.say("", A, "Three."))

    monkeypatch.setattr(talking, "_coming", at_once)
    talking.say(A, 0, "", said("Two."), TAB)
    views = followed(talking, A)
    assert again[0].shown.ended
    shown = [each for view in views for each in view.get(talking.parts.chat, []) if each]
    assert any(each == {"role": "user", "content": "Three."} for each in shown)
    assert views[-1] == {talking.parts.stage: ENDED}
    go = blocked(service)
    service.say("", A, "Four.")
    assert talking.ended(A, 0, ENDED, said(""), TAB)[talking.parts.stage] == BEGUN
    go.set()
    ended(talking, A)
