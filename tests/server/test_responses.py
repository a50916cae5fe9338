"""`/v1/responses` as OpenAI's client uses it."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from kvlite.errors import ContextError
from kvlite.server.responses import SaidBefore
from kvlite.server.served_model import Token
from kvlite.server.usage import Heard
from tests.server.conftest import Server, said
from tests.server.test_refusing import require_error


def chat(server: Server, messages: list[Any]) -> str:
    """The same question in the older way, which is compared with transformers."""
    body = {"messages": messages}
    made = server.http.post("/v1/chat/completions", json=body).json()
    return str(made["choices"][0]["message"]["content"])


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of a stream, each of which names its type twice."""
    assert answer.status_code == 200, answer.text
    found = [each.split("\ndata: ") for each in answer.text.split("\n\n") if each[:1] not in ":"]
    events = [json.loads(data) for _, data in found]
    assert [name for name, _ in found] == [f"event: {each['type']}" for each in events]
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    return events


def test_a_response_is_the_answer_of_a_chat(server: Server) -> None:
    create, name = server.client.responses.create, server.model.names[0]
    made = create(model=name, input="What is a heron?")
    assert made.output_text == chat(server, said("What is a heron?"))
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None and made.usage.output_tokens == 8
    # Open Responses asks for these, with or without a value.
    assert {"safety_identifier", "prompt_cache_key"} <= made.model_fields_set
    parts: Any = [{"type": "input_text", "text": "What is"}, {"type": "input_text", "text": "it?"}]
    again = create(model=name, input=[{"role": "user", "content": parts}], instructions="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert again.output_text == chat(server, [system, *said("What is\nit?")])


def test_a_stream_of_events_makes_the_response(server: Server) -> None:
    name = server.model.names[0]
    whole = server.client.responses.create(model=name, input="Stream it.")
    events: list[Any] = list(
        server.client.responses.create(model=name, input="Stream it.", stream=True)
    )
    kinds = [each.type.removeprefix("response.") for each in events]
    deltas = [kind for kind in kinds if kind == "output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [each.sequence_number for each in events] == [*range(len(events))]
    text = "".join(each.delta for each in events if each.type.endswith("delta"))
    assert text == events[-1].response.output_text == whole.output_text and len(deltas) > 2
    stop = {"stop": text[-3:]}  # or it is incomplete, which this helper does not take
    with server.client.responses.stream(model=name, input="Stream it.", extra_body=stop) as stream:
        stream.until_done()
        done = stream.get_final_response()
    assert (done.output_text, done.status) == (text.partition(text[-3:])[0], "completed")


def test_a_response_goes_on_from_another_and_reads_what_is_new(server: Server) -> None:
    create, name = server.client.responses.create, server.model.names[0]
    question = "A heron stands in the water. " * 40
    first = create(model=name, input=question, instructions="Be brief.")
    second = create(model=name, input="And then?", previous_response_id=first.id)
    whole = said(question, first.output_text, "And then?")
    assert second.output_text == chat(server, whole)  # without the former instructions
    third = create(model=name, input="Why?", previous_response_id=second.id)
    assert third.output_text == chat(server, [*whole, *said("", second.output_text, "Why?")[1:]])
    assert third.usage is not None
    assert third.usage.model_dump()["kvlite"]["prompt_tokens"] < third.usage.input_tokens / 4
    unkept = create(model=name, input="Forget it.", store=False)
    for unknown in (unkept.id, "resp_0"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            create(model=name, input="And?", previous_response_id=unknown)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input is empty"),
        ({"input": []}, 400, "input is empty"),
        ({"input": 7}, 400, "input"),
        ({"input": [{"role": "user"}]}, 400, "input[0] has no content"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, 400, "input has no message"),
        ({"input": [*said("a"), {"type": "message", "content": "a"}]}, 400, "input[1] has no role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0]"),
        ({"input": "a", "tools": [{"type": "function"}]}, 400, "tools[0].name"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema"}}},
            400,
            "text.format has no schema",
        ),
        ({"input": "a", "background": True}, 400, "background"),
        ({"input": "a", "conversation": "c"}, 400, "conversation"),
        ({"input": "a", "n": 2}, 400, "one answer"),
        ({"input": "a", "max_tokens": 2}, 400, "a field of responses: send max_output_tokens"),
        ({"input": "a", "response_format": {"type": "json_object"}}, 400, "send text.format"),
        ({"input": "a", "max_output_tokens": -2}, 400, "max_output_tokens -2"),
        ({"input": "a", "previous_response_id": "x" * 5000}, 404, "there is no response"),
    ],
)
def test_what_is_not_here_is_refused(
    server: Server, body: dict[str, Any], status: int, words: str
) -> None:
    require_error(server.http.post("/v1/responses", json=body), status, words)


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlite.server.responses._RESPONSES", 3)
    monkeypatch.setattr("kvlite.server.responses._CHARACTERS", 10)
    kept = SaidBefore()
    for number in range(5):
        kept.add(str(number), [{"role": "user", "content": "x"}], "{}")
    assert [*kept._said] == ["2", "3", "4"]
    kept.of("2")
    kept.add("5", [{"role": "user", "content": "x" * 5}], "{}")
    assert [*kept._said] == ["2", "5"] and kept._characters == 10
    assert kept.remove("5")["deleted"] and kept._characters == 3


def test_a_response_is_fetched_and_deleted(server: Server) -> None:
    client, name = server.client.responses, server.model.names[0]
    more: dict[str, Any] = {"reasoning": {"effort": "low"}, "prompt_cache_key": "k"}
    made = client.create(model=name, input="Keep it.", **more)
    assert made.prompt_cache_key == "k" and made.reasoning and made.reasoning.effort == "low"
    assert client.retrieve(made.id) == made
    *_, last = client.create(model=name, input="Keep it.", stream=True)
    assert last.type == "response.incomplete" and client.retrieve(last.response.id) == last.response
    address = f"/v1/responses/{made.id}"
    require_error(server.http.get(f"{address}?stream=true"), 400, "stream is not supported")
    deleted = {"id": made.id, "object": "response", "deleted": True}
    assert server.http.delete(address).json() == deleted
    client.delete(last.response.id)
    unkept = client.create(model=name, input="Forget it.", store=False)
    for unknown in (made.id, last.response.id, unkept.id, "resp_0"):
        for ask in (client.retrieve, client.delete):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                ask(unknown)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.create(model=name, input="And?", previous_response_id=unknown)


def test_what_goes_wrong_is_an_error_before_the_stream_and_an_event_within_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"input": "a b " * 3000, "stream": True}
    error = require_error(server.http.post("/v1/responses", json=body), 400, "tokens")
    assert error["code"] == "context_length_exceeded"
    waits = Heard(Token(waiting="waiting, 1 before this one"))
    for first in ([waits], []):

        async def failing(*_: Any, heard: list[Heard] = first) -> AsyncGenerator[Heard]:
            for each in heard:
                yield each
            raise ContextError("the prompt has too many tokens")

        monkeypatch.setattr("kvlite.server.responses.heard_of", failing)
        answer = server.http.post("/v1/responses", json=body | {"input": "Hi"})
        if not first:
            require_error(answer, 400, "too many tokens")
            continue
        events = events_of(answer)
        assert [each["type"] for each in events] == [
            *("response.created", "response.in_progress", "response.failed")
        ]
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and failed["output"] == []
        assert failed["error"]["code"] == "context_length_exceeded"
        assert "too many tokens" in failed["error"]["message"]
