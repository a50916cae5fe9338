"""Values as clients send them: nulls, numbers that say nothing, 5.0 for 5, empty texts."""

from typing import Any

import pytest

from kvlite.server.fields import Chat, Completion, ResponseRequest, Tokenizing
from tests.server.conftest import Server, said
from tests.server.test_guided import CHAT, answered, sent
from tests.server.test_refusing import require_error

# What changes nothing in a greedy answer.
NOTHING: list[dict[str, Any]] = [
    {"top_k": -1},
    {"top_k": 0, "top_p": 1, "min_p": 0},
    {"seed": -1},
    {"seed": 42.0, "n": 1.0},
    {"temperature": 0, "top_p": 0},
    {"logit_bias": []},
    {"logit_bias": {}},
    {"logit_bias": [[5, 0.0]]},
    {"stop": ""},
    {"stop": []},
    {"stop": [""]},
    {"model": ""},
    {"n_predict": None},
    {"n_probs": 0, "id_slot": -1, "keep_alive": -1, "typical_p": 1, "ignore_eos": False},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
    {"stream": False, "stream_options": {}},
    {"kvlite": {}, "response_format": {"type": "text"}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "5"}, "max_tokens is not a whole number"),
    ({"max_tokens": 5.5}, "max_tokens is not a whole number"),
    ({"max_tokens": -2}, "max_tokens -2"),
    ({"max_tokens": True}, "max_tokens is not a whole number"),
    ({"top_k": -2}, "top_k -2"),
    ({"seed": "42"}, "seed is not a whole number"),
    ({"temperature": "0.7"}, "temperature is not a number"),
    ({"stream": "false"}, "stream is not true or false"),
    ({"stream": 1}, "stream is not true or false"),
    ({"n": ""}, "n is not a whole number"),
    ({"logit_bias": [5]}, "logit_bias is not an object"),
    ({"logit_bias": [["heron", 1]]}, "logit_bias 'heron"),
    ({"n_predict": 5}, "n_predict is not a field: did you mean max_tokens?"),
]


@pytest.mark.parametrize("given", NOTHING, ids=str)
def test_some_values_say_nothing(server: Server, given: dict[str, Any]) -> None:
    for path in (CHAT, "/v1/completions"):
        assert answered(server, path, max_tokens=6, **given) == answered(server, path, max_tokens=6)


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=str)
def test_values_of_another_kind_are_refused_by_name(
    server: Server, given: dict[str, Any], words: str
) -> None:
    body = {"messages": said("Hi"), **given}
    assert require_error(server.http.post(CHAT, json=body), 400, words)["param"] in given


def test_every_field_may_be_null(server: Server) -> None:
    for path, kind in ((CHAT, Chat), ("/v1/completions", Completion), ("/tokenize", Tokenizing)):
        needed = "prompt" if kind is Completion else "messages"
        body = {
            **dict.fromkeys(kind.model_fields),
            needed: "Hi" if needed == "prompt" else said(""),
        }
        answer = server.http.post(
            path, json=body | ({} if kind is Tokenizing else {"max_tokens": 1})
        )
        assert answer.status_code == 200, answer.text
    body = {**dict.fromkeys(ResponseRequest.model_fields), "input": "Hi", "max_output_tokens": 1}
    assert server.http.post("/v1/responses", json=body).status_code == 200


def test_minus_one_is_no_limit_but_the_servers(server: Server) -> None:
    for path, name in (
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ):
        body = {**sent(path), "max_tokens": None, name: -1}
        if path == "/v1/responses":
            del body["max_tokens"]
        usage = server.http.post(path, json=body).json()["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 8  # the server's
    # A completion is short only where nothing is said.
    body = {"prompt": "Hi", "max_tokens": 5.0}
    assert server.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5


def test_a_bias_may_be_a_list_of_pairs(server: Server) -> None:
    first = answered(server, CHAT, max_tokens=1)
    ids = server.http.post("/tokenize", json={"prompt": first, "add_special": False}).json()
    for bias in ([[ids["tokens"][0], False]], {str(ids["tokens"][0]): -100}):
        assert answered(server, CHAT, max_tokens=1, logit_bias=bias) != first


MESSAGES: list[tuple[list[dict[str, Any]], str]] = [
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], ""),
    ([{"role": "user", "content": []}], ""),
    ([{"role": "user", "content": "Hi", "name": None, "tool_calls": None}], ""),
    ([{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]}], ""),
    ([{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *said("Hi")], ""),
    ([{"role": "developer", "content": [{"type": "text", "text": "a"}]}, *said("Hi")], ""),
    ([*said("Hi"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], ""),
    ([*said("Hi"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}], ""),
    ([*said("Hi"), {"role": "assistant", "content": "a", "function_call": None}, *said("b")], ""),
    (
        [*said("Hi"), {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
        "messages[1].function_call is not taken: send tool_calls",
    ),
    ([{"role": "user", "content": [{"type": "video_url", "text": "a"}]}], "type 'video_url'"),
    ([{"role": "user", "content": [{"type": "", "text": "a"}]}], "a part of type ''"),
    ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0] is not an object"),
    ([{"role": "tool", "content": {"a": 1}}], "messages[0].content is not a text or a list"),
]


@pytest.mark.parametrize(("messages", "words"), MESSAGES, ids=str)
def test_messages_have_parts_and_nulls(
    server: Server, messages: list[dict[str, Any]], words: str
) -> None:
    answer = server.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    if words:
        require_error(answer, 400, words)
    else:
        assert answer.status_code == 200, answer.text


def test_items_of_responses_have_nulls_and_objects(server: Server) -> None:
    nulls = dict.fromkeys(("id", "status", "call_id", "name", "arguments", "output"))
    call = {"type": "function_call", "name": "f", "arguments": {"a": 1}, "call_id": None}
    items = [
        {**nulls, "type": "message", "role": "user", "content": "Hi"},
        {**nulls, **call},
        {**nulls, "type": "function_call_output"},
        {**nulls, "role": "user", "type": None, "content": [{"type": "input_text", "text": "b"}]},
    ]
    body = {"input": items, "previous_response_id": "", "max_output_tokens": 1, "text": None}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
