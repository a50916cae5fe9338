"""Log probabilities of characters that several tokens make, by its tokens."""

import json
from typing import Any

import pytest

from tests.server.conftest import Server

WORDS = ["🦦🦦", "👩‍👧 family", "獺は川", "été"]
AT_STOP = ["🦦", "🦫", "b獺", "獺c"]


def form(word: str) -> dict[str, Any]:
    schema = {"type": "string", "const": word}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def ask(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.http.post(f"/v1/{path}", json=fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chunks(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", f"/v1/{path}", json={**fields, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


def joined(content: list[dict[str, Any]]) -> str:
    return b"".join(bytes(each["bytes"]) for each in content).decode()


def hello(**fields: Any) -> dict[str, Any]:
    return {
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        **fields,
    }


def named(content: list[dict[str, Any]]) -> list[Any]:
    """Tokens and their bytes: the numbers may differ in the last digit."""
    return [(each["token"], each["bytes"]) for each in content]


@pytest.mark.parametrize("word", WORDS)
def test_bytes_join_to_the_text(server: Server, word: str) -> None:
    asked = hello(response_format=form(word), top_logprobs=2)
    (choice,) = ask(server, "chat/completions", **asked)["choices"]
    content = choice["logprobs"]["content"]
    assert json.loads(choice["message"]["content"]) == word
    assert joined(content) == choice["message"]["content"]
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    parts = [each["choices"][0] for each in chunks(server, "chat/completions", **asked)]
    streamed = [each for part in parts for each in (part["logprobs"] or {}).get("content", ())]
    assert named(streamed) == named(content)


@pytest.mark.parametrize("stop", AT_STOP)
def test_a_stop_strings_tokens_have_none(server: Server, stop: str) -> None:
    word = "aa🦦🦫bb獺cc"
    asked = hello(response_format=form(word), stop=[stop])
    (choice,) = ask(server, "chat/completions", **asked)["choices"]
    content, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert text == json.dumps(word, ensure_ascii=False).partition(stop)[0]
    data = b"".join(bytes(each["bytes"]) for each in content)
    begun = data[: -len(content[-1]["bytes"])]
    assert data.startswith(text.encode()) and len(begun) < len(text.encode())
    parts = [each["choices"][0] for each in chunks(server, "chat/completions", **asked)]
    streamed = [each for part in parts for each in (part["logprobs"] or {}).get("content", ())]
    assert named(streamed) == named(content)


@pytest.mark.parametrize("echo", [False, True])
def test_completions_name_each_token_once_and_point_into_it(server: Server, echo: bool) -> None:
    asked = {"prompt": "Otter 🦦獺: ", "logprobs": 5, "echo": echo, "max_tokens": 20}
    asked["response_format"] = form(WORDS[0])
    (choice,) = ask(server, "completions", **asked)["choices"]
    found, text = choice["logprobs"], choice["text"]
    assert all(each is None or len(each) in (5, 6) for each in found["top_logprobs"])
    assert any(each.startswith("bytes:\\xf0") for each in found["tokens"])
    starts = zip(found["text_offset"], found["tokens"], strict=True)
    for at, token in starts:
        assert token.startswith("bytes:") or text.startswith(token, at), (at, token)
    assert found["text_offset"] == sorted(found["text_offset"])
    parts = [each["choices"][0] for each in chunks(server, "completions", **asked)]
    offsets = [at for part in parts for at in (part["logprobs"] or {}).get("text_offset", ())]
    assert offsets == found["text_offset"]


def test_responses_have_them_where_they_are_asked_for(server: Server) -> None:
    more: Any = {
        "input": "Name a bird",
        "max_output_tokens": 3,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "model": server.model.names[0],
    }
    made = server.client.responses.create(**more)
    part: Any = made.output[0].content[0]  # type: ignore[union-attr, index]
    assert b"".join(bytes(each.bytes) for each in part.logprobs).decode() == part.text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs) and made.top_logprobs == 2
    events: Any = list(server.client.responses.create(**more, stream=True))
    told = [each for event in events if event.type.endswith("delta") for each in event.logprobs]
    assert [each.token for each in told] == [each.token for each in part.logprobs]
    last = events[-1].response.output[0].content[0].logprobs
    assert [each.bytes for each in last] == [each.bytes for each in part.logprobs]
    assert (
        not server.client.responses.create(**{**more, "include": [], "top_logprobs": 0})
        .output[0]
        .content[0]
        .logprobs
    )  # type: ignore[union-attr, index]
    refused = server.http.post("/v1/responses", json={**more, "include": []})
    assert refused.status_code == 400 and "include" in refused.text
