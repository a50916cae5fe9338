"""What streams send while a request waits and its prompt is read: at once, then every few seconds,
in forms that clients take."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest

from kvlite.server import anthropic as anthropic_dialect
from kvlite.server import served_model
from kvlite.web.work import Work
from tests.server.conftest import Server, said

HI: dict[str, Any] = {"messages": said("Hello."), "stream": True}
ROADS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**HI, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello.", "stream": True, "max_tokens": 4},
    "/v1/responses": {"input": "Hello.", "stream": True, "max_output_tokens": 4},
    "/v1/messages": {**HI, "max_tokens": 4},
    "/api/chat": {"messages": said("Hello."), "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "Hello.", "options": {"num_predict": 4}},
}


@pytest.fixture
def busy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine has other work until this is set; a waiting client hears something often."""
    monkeypatch.setattr(served_model, "BEAT", 0.1)
    over = threading.Event()
    server.state.engine.submit(lambda work: over.wait(120), "Reading")
    yield over
    over.set()
    server.until_idle()


@contextmanager
def for_a_second(over: threading.Event) -> Iterator[None]:
    """What is done within waits so long."""
    timer = threading.Timer(1, over.set)
    timer.start()
    yield
    timer.cancel()


@pytest.mark.parametrize("road", ROADS)
def test_who_waits_hears_something_at_once_and_again(
    server: Server, busy: threading.Event, road: str
) -> None:
    since, began = time.monotonic(), list[float]()
    with server.http.stream("POST", road, json=ROADS[road]) as answer:
        assert answer.status_code == 200
        assert time.monotonic() - since < 3, "the head comes before the answer"
        heard = list[str]()
        for line in answer.iter_lines():
            began.append(time.monotonic())
            heard += [line] if line else []
            if len(heard) == 8:
                busy.set()
    assert busy.is_set(), "all before that came while it waited"
    told = [each.removeprefix("data: ") for each in heard[:8]]
    if road.startswith("/api/"):
        lines = [json.loads(each) for each in heard]
        assert all(not each["done"] for each in lines[:-1]) and lines[-1]["done"]
        text = [each.get("response", each.get("message", {}).get("content")) for each in lines[:7]]
        assert text == [""] * 7
        return
    assert told[0] == ": waiting, 1 before this one"
    if road == "/v1/messages":
        assert heard[1] == "event: message_start"
        assert heard[3:5] == ["event: ping", 'data: {"type": "ping"}']
    elif road == "/v1/responses":
        kinds = [json.loads(each)["type"] for each in told if each.startswith("{")]
        assert kinds[:3] == ["response.created", *["response.in_progress"] * 2]
    else:
        assert all(each.startswith(": ") for each in heard[:8])


@pytest.mark.parametrize("client", ["chat", "responses", "anthropic"])
def test_clients_read_such_streams(server: Server, busy: threading.Event, client: str) -> None:
    name, hello = server.model.names[0], said("Hello.")
    with for_a_second(busy):
        if client == "chat":
            chunks = server.client.chat.completions.create(
                model=name, messages=hello, max_tokens=4, stream=True
            )
            text = "".join(each.choices[0].delta.content or "" for each in chunks)
        elif client == "responses":
            with server.client.responses.stream(
                model=name, input="Hello.", max_output_tokens=4
            ) as events:
                found = [*events]
            kinds = [each.type for each in found]
            (text,) = (each.text for each in found if each.type == "response.output_text.done")
            assert kinds[0] == "response.created" and kinds.count("response.in_progress") > 1
        else:
            own = anthropic.Anthropic(base_url=server.address, api_key="any", max_retries=0)
            with own.messages.stream(model=name, messages=hello, max_tokens=4) as stream:
                text = stream.get_final_text()
    made = server.client.chat.completions.create(model=name, messages=hello, max_tokens=4)
    assert text == made.choices[0].message.content


def test_who_counts_no_pings_hears_an_event_now_and_then(
    server: Server, busy: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claude Code hangs up after five minutes of pings alone."""
    monkeypatch.setattr(anthropic_dialect, "EVENT_BEATS", 2)
    client = anthropic.Anthropic(base_url=server.address, api_key="any", max_retries=0)
    given: dict[str, Any] = {"model": server.model.names[0], "messages": said("Hello.")}
    with for_a_second(busy), client.messages.stream(**given, max_tokens=4) as stream:
        events = [*stream]
        waited = stream.get_final_message()
    kinds = [each.type for each in events]
    assert kinds[0] == "message_start" and kinds.count("message_start") == 1
    assert kinds.index("content_block_start") > 2 and set(kinds[1:3]) == {"message_delta"}
    made = client.messages.create(**given, max_tokens=4)
    assert waited.content[0].text == made.content[0].text  # type: ignore[union-attr]
    assert waited.stop_reason == made.stop_reason
    assert waited.usage.output_tokens == made.usage.output_tokens


@pytest.mark.parametrize("road", ROADS)
def test_what_is_wrong_is_an_answer_of_its_own_however_long_others_take(
    server: Server, busy: threading.Event, road: str
) -> None:
    wrong: dict[str, Any] = {"kvlite": {"method": "snapkv", "budget": "12"}}
    answer = server.http.post(road, json={**ROADS[road], **wrong}, timeout=20)
    assert not busy.is_set()
    assert answer.status_code == 400 and "budget" in answer.text, answer.text
    if road == "/v1/chat/completions":
        biased = server.http.post(
            road, json={**ROADS[road], "logit_bias": {"9999999": 1}}, timeout=20
        )
        assert biased.status_code == 400 and "vocabulary" in biased.text


def test_how_far_reading_is_is_told_in_tokens() -> None:
    work = Work(lambda work: None, "")
    work.show(title=" of 20,190 tokens", done=1, total=3)
    assert served_model._waiting(work) == "reading, 33% of 20,190 tokens"
