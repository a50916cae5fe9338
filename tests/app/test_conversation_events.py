"""What a page is told by each event, whatever comes in between."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from kvlite.config.settings import Settings
from kvlite.conversation.library import Library
from kvlite.conversation.session import Session
from kvlite.errors import ContextError, SettingError
from kvlite_app.conversation_events import ConversationEvents
from kvlite_app.conversation_view import BEGUN, ENDED, ConversationView
from kvlite_app.engine.service import Service
from kvlite_app.form import Models
from kvlite_app.layout import Parts
from kvlite_app.too_long import TooLongEvents
from tests.app.conftest import upload
from tests.app.test_service import A, B, blocked, no_room, stops

TAB: Any = gr.Request(session_hash="tab")


@pytest.fixture
def events(tiny_folder: Path, tmp_path: Path) -> Iterator[ConversationEvents]:
    settings = Settings(model=str(tiny_folder), max_new_tokens=4)
    service = Service(settings, tmp_path)
    with gr.Blocks(analytics_enabled=False):
        yield ConversationEvents(service, Parts(settings, Models()))
    service.close()


def said(text: str, *files: str) -> dict[str, Any]:
    return {"text": text, "files": [*files]}


def box(events: ConversationEvents, view: dict[Any, Any]) -> dict[str, Any]:
    """What a view changes of the box."""
    return dict(view[events.parts.box]._constructor_args[0])


def followed(events: ConversationEvents, id: str) -> list[dict[Any, Any]]:
    return [*events.follow(id, 0, BEGUN, TAB)]


def ended(events: ConversationEvents, id: str) -> None:
    """Wait until nothing is done for a conversation any more."""
    work = events.service.work_for("", id)
    assert work is not None
    for _ in work.follow():
        pass


@pytest.mark.long
def test_what_is_sent_is_followed_to_its_end(events: ConversationEvents) -> None:
    parts = events.parts
    begun = events.say(A, 0, "", said("One."), TAB)
    assert (begun[parts.stage], begun[parts.here]) == (BEGUN, A)
    assert box(events, begun)["value"] is None
    *_, last = followed(events, A)
    assert last == {parts.stage: ENDED}
    view = events.ended(A, 0, ENDED, said(""), TAB)
    assert [each["role"] for each in view[parts.chat]] == ["user", "assistant", "assistant"]
    assert "value" not in box(events, view)
    # One that was told of another stage shows nothing.
    assert parts.chat not in events.ended(A, 0, BEGUN, said(""), TAB)
    assert parts.stage not in [*events.follow(A, 0, "", TAB)][-1]


@pytest.mark.long
def test_who_chose_another_conversation_meanwhile_has_that_one(
    events: ConversationEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, say = events.parts, events.service.say

    def chosen(owner: str, id: str, text: str, files: Any = ()) -> Any:
        events.show(B, "", A, said(text), TAB)
        if text == "refused":
            raise SettingError("no")
        return say(owner, id, text, files)

    events.service.say("", B, "One.").wait()
    monkeypatch.setattr(events.service, "say", chosen)
    go = blocked(events.service)
    assert parts.here not in events.say(A, 0, "", said("One."), TAB)
    assert parts.stage not in followed(events, A)[-1]
    assert parts.here not in events.ended(A, 0, ENDED, said(""), TAB)
    go.set()
    ended(events, A)
    assert parts.here not in events.say(A, 0, "", said("refused"), TAB)
    assert events.ended(B, 0, ENDED, said(""), TAB)[parts.here] == B


def test_what_was_chosen_before_the_page_is_there_stays(events: ConversationEvents) -> None:
    parts = events.parts
    chosen = events.show("", "", "", None, TAB)[parts.here]
    assert chosen not in ("", A)
    assert parts.here not in events.load(A, "", TAB)  # which comes too late
    other: Any = gr.Request(session_hash="other")
    assert events.load(A, "", other)[parts.here] == A


@pytest.mark.long
def test_only_what_is_sent_leaves_the_box(
    events: ConversationEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.service.say("", A, "One.").wait()
    assert "value" not in box(events, events.regenerate(A, 0, TAB))
    followed(events, A)
    go = blocked(events.service)
    events.regenerate(A, 0, TAB)
    assert "value" not in box(events, events.show(A, "", "", None, TAB))
    go.set()
    followed(events, A)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "say", stops)
        events.say(A, 0, "", said("An older one."), TAB)
        ended(events, A)
    with monkeypatch.context() as patch:
        patch.setattr(Library, "save", no_room)
        refused = events.say(A, 0, "", said("Two."), TAB)
    assert "value" not in box(events, refused)
    assert "not sent" in refused[events.parts.status]


@pytest.mark.long
def test_what_is_dropped_is_read_while_the_box_stays_as_it_is(events: ConversationEvents) -> None:
    file = upload(events.service, "a.txt", b"Herons live by the water.")
    begun = events.read_ahead(A, 0, "", said("Where do", file), TAB)
    assert begun[events.parts.stage] == BEGUN
    assert box(events, begun) == {"submit_btn": True, "stop_btn": True}
    ended(events, A)
    view = events.ended(A, 0, ENDED, said("Where do they", file), TAB)
    assert box(events, view) == {"submit_btn": True, "stop_btn": False}
    assert "Read: a.txt" in str(view[events.parts.chat])
    nothing = {events.parts.start: gr.skip()}
    assert events.read_ahead(A, 0, "", said("Where do they", file), TAB) == nothing
    begun = events.say(A, 0, "", said("Where do they live?", file), TAB)
    assert box(events, begun)["value"] is None
    ended(events, A)
    assert events.service.record("", A).said[0].documents == ("a.txt",)
    assert events.read_ahead(A, 0, "", said(""), TAB) == nothing


@pytest.mark.long
def test_a_message_without_an_answer_is_in_the_box_again_with_its_files(
    events: ConversationEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (upload(events.service, name, b"nothing") for name in ("a.txt", "b.pdf"))
    events.say(A, 0, "", said("What is in it?", good, bad), TAB)
    followed(events, A)
    view = events.ended(A, 0, ENDED, said(""), TAB)
    assert box(events, view)["value"] == said("What is in it?", good)
    assert "b.pdf" in view[events.parts.status]
    assert [each.title for each in events.service.store("").records()] == ["What is in it?"]
    told = events.show(A, "", B, said(""), TAB)[events.parts.status]
    assert "b.pdf" in told and told == view[events.parts.status]
    monkeypatch.setattr(Session, "say", stops)
    events.say(A, 0, "", said("And without?"), TAB)
    followed(events, A)
    assert box(events, events.show(A, "", "", None, TAB))["value"] == said("And without?")


def test_what_was_refused_while_another_was_shown_has_its_reason_until_that_is_gone(
    events: ConversationEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.service.say("", A, "One.").wait()

    def refuses(*_: Any) -> Any:
        raise ContextError("there is no room for it")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "say", refuses)
        events.say(A, 0, "", said("Two."), TAB)
        events.show(B, "", A, said(""), TAB)
        ended(events, A)
    view = events.show(A, "", B, said(""), TAB)
    assert "there is no room for it" in view[events.parts.status]
    assert box(events, view)["value"] == said("Two.")
    assert events.refresh(A, 0, TAB)[events.parts.status] == ""
    events.service.load(events.service.host.settings).wait()
    assert events.show(A, "", B, said(""), TAB)[events.parts.status] == ""
    events.say(A, 0, "", said("Two."), TAB)
    ended(events, A)
    assert events.show(A, "", B, said(""), TAB)[events.parts.status] == ""


def test_an_answer_that_was_cut_may_go_on_where_there_is_room(events: ConversationEvents) -> None:
    """Where the context is full, only if the oldest part may be forgotten."""
    events.service.say("", A, "One.").wait()
    view = ConversationView(events.service, events.parts, TAB, A)
    goes_on = view.idle()[events.parts.go_on]._constructor_args[0]
    assert goes_on["visible"]
    cut = {"finish_reason": "length"}
    assert view._goes_on({"ledger": cut}) and not view._goes_on({})  # of versions before
    full = {"ledger": cut | {"limit": "context"}}
    assert not view._goes_on(full)
    events.service.change("", A, {"beyond_context": "compact"}).wait()
    assert view._goes_on(full)


@pytest.mark.long
def test_what_cannot_be_read_any_more_leaves_nobody_waiting(events: ConversationEvents) -> None:
    events.service.say("", A, "One.").wait()
    go = blocked(events.service)
    events.say(A, 0, "", said("Two."), TAB)
    (events.service.store("").place(A) / "record.json").write_text("{")
    assert [*events.follow(A, 0, BEGUN, TAB)][-1] == {events.parts.stage: ENDED}
    view = events.ended(A, 0, ENDED, said(""), TAB)
    assert "cannot be read" in view[events.parts.status]
    assert box(events, view) == {"submit_btn": True, "stop_btn": False}
    go.set()
    ended(events, A)


def test_what_is_typed_stays_whatever_was_not_answered(events: ConversationEvents) -> None:
    store, typed = events.service.store(""), said("Typed meanwhile.")
    for id in (A, B):
        store.keep_draft(id, f"Not answered {id[0]}")
    assert box(events, events.show(A, "", "", said(""), TAB))["value"]["text"]
    assert "value" not in box(events, events.show(B, "", A, typed, TAB))
    # What is kept with the one that was shown makes room for what the other one has.
    kept = said(store.record(A).draft)
    assert box(events, events.show(B, "", A, kept, TAB))["value"] == said(store.record(B).draft)
    assert "value" not in box(events, events.ended(B, 0, ENDED, typed, TAB))


@pytest.mark.long
def test_a_check_is_ended_alone_and_what_it_came_to_is_found_again(
    events: ConversationEvents,
) -> None:
    parts, service = events.parts, events.service
    service.say("", A, "One.").wait()
    events.show(A, "", "", said(""), TAB)
    go, told = blocked(service), events.check(A, TAB)
    assert "doing" in next(told)
    events.stop_check(B, TAB)
    left = threading.Thread(target=lambda: events.show(B, "", A, said(""), TAB))
    left.start()
    assert [*told][-1] == gr.skip()  # nothing of it is shown beside another conversation
    left.join(60)
    go.set()
    ended(events, A)
    assert "The same answer" in events.show(A, "", B, said(""), TAB)[parts.difference]
    service.say("", A, "Two.").wait()
    assert events.show(A, "", A, said(""), TAB)[parts.difference] == ""

    go = blocked(service)
    told = events.check(A, TAB)
    next(told)
    events.stop_check(A, TAB)
    go.set()
    ended(events, A)
    assert "checked" not in [*told][-1]
    service.say("", A, "Three.")
    events.stop_check(A, TAB)  # which ends no answer
    ended(events, A)
    assert len(service.record("", A).said) == 6


@pytest.mark.long
def test_what_comes_late_is_not_shown_beside_another_conversation(
    events: ConversationEvents,
) -> None:
    parts, event = events.parts, gr.SelectData(None, {"index": 0, "value": ""})
    for id in (A, B):
        events.service.say("", id, "One.").wait()
    events.show(B, "", "", said(""), TAB)
    assert parts.chat not in events.show_all(A, TAB)
    assert parts.chat in events.show_all(B, TAB)
    assert events.choose(A, 0, event, TAB)[0] == gr.skip()
    assert events.choose(B, 0, event, TAB)[0] == 1
    assert parts.here not in events.say(A, 0, "", said(""), TAB)
    assert parts.here not in events.delete(A, "", A, said(""), TAB)
    assert not events.service.store("").has(A)
    assert events.delete(B, "", B, said(""), TAB)[parts.here] not in (A, B)
    assert events.restore(B, "", "", said(""), TAB)[parts.here] == B


def test_what_is_too_long_stays_in_the_box_with_a_way_on(
    events: ConversationEvents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))  # no other model was used
    parts, offers = (
        events.parts.too_long,
        TooLongEvents(events.service, events.parts.too_long, Models(), events.tabs),
    )
    file = upload(events.service, "a.txt", b"The sea was calm. Herons wait.\n\n" * 500)
    events.say(A, 0, "", said("What do herons do?", file), TAB)
    followed(events, A)
    view = events.ended(A, 0, ENDED, said(""), TAB)
    assert box(events, view)["value"] == said("What do herons do?", file)
    assert shown(view[parts.bar]) and shown(view[parts.relevant]) and not shown(view[parts.compact])
    told, longer = offers.price(view[parts.unpriced], A, TAB)
    assert "at most" in told[parts.told] and " tokens, " in told[parts.told]
    assert longer[parts.longer] == "smollm2-135m" and shown(longer[parts.use])
    assert "smollm2-135m takes all " in longer[parts.told]
    gone = events.read_ahead(A, 0, "", said("What do herons do?"), TAB)
    assert not shown(gone[parts.bar]) and gone[events.parts.status] == ""
    assert parts.bar not in events.say_parts(A, 0, "", said("", file), TAB)
    begun = events.say_parts(A, 0, "", said("What do herons do?", file), TAB)
    assert begun[events.parts.stage] == BEGUN and not shown(begun[parts.bar])
    followed(events, A)
    view = events.ended(A, 0, ENDED, said(""), TAB)
    assert "text search found" in str(view[events.parts.chat]) and not shown(view[parts.bar])
    assert view[events.parts.status].count("refused") == 0


def test_a_conversation_that_is_too_long_can_be_compacted(events: ConversationEvents) -> None:
    parts = events.parts.too_long
    words = "The sea was calm. " * 80
    events.service.say("", A, 2 * words).wait()
    for refused, offered in ((2 * words, False), (words, True)):
        with pytest.raises(ContextError):
            events.service.say("", A, refused).wait()
        view = events.show(A, "", "", None, TAB)
        assert shown(view[parts.bar]) == offered
    assert shown(view[parts.compact]) and not shown(view[parts.relevant])
    events.compact(A, 0, "", said(words), TAB)
    followed(events, A)
    assert len(events.service.record("", A).said) == 4


def shown(update: Any) -> bool:
    """Whether an update shows a component."""
    return bool(update._constructor_args[0]["visible"])
