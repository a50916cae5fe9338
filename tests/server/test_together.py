"""Requests that are answered in the same decode steps, each as if it alone had been asked."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from kvlite.errors import OutOfMemory
from kvlite.server import conversations, kept
from tests.server.conftest import Server, said
from tests.server.test_chat import expected, reference

__all__ = ["reference"]
CHAT = "/v1/chat/completions"


def held(server: Server) -> threading.Event:
    """The engine is at work until this is set, so that requests come together."""
    over = threading.Event()
    server.state.engine.submit(lambda work: over.wait(120), "Something else")
    return over


async def at_once(server: Server, bodies: list[Any], over: threading.Event) -> list[Any]:
    client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0)
    create, name = client.chat.completions.create, server.model.names[0]
    asked = []
    for body in bodies:  # in this order
        asked.append(asyncio.ensure_future(create(model=name, **body)))
        while len(server.model.answering.waiting) < len(asked):
            await asyncio.sleep(0.01)
    over.set()
    return list(await asyncio.gather(*asked))


def ledger(made: Any) -> dict[str, Any]:
    found = made.usage.model_dump()["kvlite"]
    assert isinstance(found, dict)
    return found


def test_answers_of_any_length_and_kind_are_those_of_each_alone(
    server: Server, reference: Any
) -> None:
    lengths = (3, 9, 14, 5)
    bodies: list[Any] = [
        {"messages": said(f"number {at}"), "max_tokens": longest, "logprobs": at == 2}
        for at, longest in enumerate(lengths)
    ]
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red", "blue"]}}}
    bodies += [
        {"messages": said("Which?"), "response_format": schema, "max_tokens": 20},
        {"messages": said("Draw."), "temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 9},
        {"messages": said("Keep little."), "extra_body": {"kvlite": {"budget": "32"}}},
    ]
    alone = [
        server.client.chat.completions.create(model="tiny", **each)
        for each in bodies[len(lengths) :]
    ]
    made = asyncio.run(at_once(server, bodies, held(server)))
    for at, (longest, each) in enumerate(zip(lengths, made, strict=False)):
        assert each.choices[0].message.content == expected(
            reference, bodies[at]["messages"], longest
        )
        assert ledger(each)["generated_tokens"] == longest and ledger(each)["together"] > 1
    for one, other in zip(alone, made[len(lengths) :], strict=True):
        assert one.choices == other.choices
        assert ledger(one)["together"] == 1 < ledger(other)["together"]
    assert not server.model.answering.going and not any(
        each.busy for each in server.model.conversations.kept
    )


@pytest.mark.parametrize("recalls", [False, True])
def test_two_questions_about_one_document_wait_for_its_reading_and_others_do_not(
    server: Server, reference: Any, monkeypatch: pytest.MonkeyPatch, recalls: bool
) -> None:
    """From a cache that nothing leaves the second one's is copied while the first is answered; one
    that recalls has to come to its end first."""
    monkeypatch.setattr(kept, "SHORT", 100)
    document = "A stork stands on the roof. " * 40
    bodies: list[Any] = [
        {"messages": said(f"{document}\n\nWhere?"), "max_tokens": 20},
        {"messages": said(f"{document}\n\nWho?"), "max_tokens": 6},
        {"messages": said("Something else."), "max_tokens": 10},
    ]
    for body in bodies[:2] if recalls else []:
        body["extra_body"] = {"kvlite": {"budget": "64"}}
    made = asyncio.run(at_once(server, bodies, held(server)))
    for body, each in zip(bodies, made, strict=True):
        if "extra_body" not in body:
            assert each.choices[0].message.content == expected(
                reference, body["messages"], body["max_tokens"]
            )
    first, second, other = map(ledger, made)
    assert first["prompt_tokens"] > 200 and second["prompt_tokens"] < 80
    together = (first["together"], second["together"], other["together"])
    assert together == ((2, 1, 2) if recalls else (3, 3, 3))


def test_one_joins_one_leaves_and_one_for_which_memory_is_short_waits(
    server: Server, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, refused = conversations.answer_prompt, list[int]()

    def short(talk: Any, ids: list[int], **given: Any) -> Any:
        if len(server.model.answering.going) > 1:
            refused.append(len(ids))
            raise OutOfMemory("there is no room")
        return answer(talk, ids, **given)

    body: dict[str, Any] = {"messages": said("Go on."), "max_tokens": 700, "stream": True}
    with ThreadPoolExecutor() as clients:
        with server.http.stream("POST", CHAT, json=body) as long:
            lines = long.iter_lines()
            next(lines)
            ask = {"messages": said("Join."), "max_tokens": 8}
            joined = clients.submit(server.http.post, CHAT, json=ask).result(300).json()
            assert joined["choices"][0]["message"]["content"] == expected(
                reference, ask["messages"], 8
            )
            assert joined["usage"]["kvlite"]["together"] == 2
            with pytest.raises(httpx.TimeoutException):
                server.http.post(CHAT, json={**body, "stream": False}, timeout=0.3)
            monkeypatch.setattr(conversations, "answer_prompt", short)
            waits = clients.submit(server.http.post, CHAT, json={**ask, "messages": said("Wait.")})
            while not (refused and server.model.answering.waiting):
                next(lines)
            assert not waits.done() and len(server.model.answering.waiting) == 1
        waited = waits.result(300).json()  # the long one has gone away
    assert waited["choices"][0]["message"]["content"] == expected(reference, said("Wait."), 8)
    assert len(refused) < 3  # again when the vanished one has ended, not at every token
