"""Whatever a field holds, each dialect answers, or refuses in its own shape; nothing else."""

import json
import re
from copy import deepcopy
from typing import Any

import pytest

from tests.server.conftest import Server, said
from tests.server.test_refusing import BODIES

MESSAGES = {"messages": said("Hi")}
TALK = "messages messages.0 messages.0.role messages.0.content messages.0.tool_calls"
OPTIONS = (
    "num_predict temperature top_p top_k min_p seed stop repeat_penalty presence_penalty "
    "frequency_penalty"
)
OLLAMA = " ".join(
    ["model stream options format think kvlite", *(f"options.{name}" for name in OPTIONS.split())]
)
DRAWN = "temperature top_p top_k min_p seed stop presence_penalty repetition_penalty logit_bias"
# Each dialect's address, a good request, and fields that it knows; those of a field after a dot.
DIALECTS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/messages": (
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "max_tokens": 1,
            "tools": [{"name": "a", "input_schema": {}}],
        },
        f"{TALK} messages.0.content.0 messages.0.content.0.type messages.0.content.0.text model "
        "system max_tokens stop_sequences stream temperature top_p top_k tools tools.0 "
        "tools.0.name tools.0.input_schema tool_choice tool_choice.type thinking thinking.type "
        "thinking.budget_tokens output_config output_config.format output_config.effort "
        "output_format kvlite",
    ),
    "/v1/chat/completions": (
        {**MESSAGES, "max_tokens": 1},
        f"{TALK} {DRAWN} tools tool_choice response_format logprobs n kvlite functions "
        "stream_options chat_template_kwargs reasoning_effort thinking thinking.type max_tokens "
        "model",
    ),
    "/v1/completions": (
        {"prompt": "Hi", "max_tokens": 1},
        f"{DRAWN} prompt max_tokens n echo logprobs suffix best_of stream stream_options "
        "response_format response_format.type response_format.json_schema "
        "stream_options.include_usage kvlite kvlite.budget kvlite.method kvlite.recall model",
    ),
    "/v1/responses": (
        {"input": said("Hi"), "max_output_tokens": 1},
        "input input.0 input.0.role input.0.content input.0.type instructions tools tool_choice "
        "text text.format text.format.type include reasoning reasoning.effort store metadata "
        "previous_response_id max_output_tokens temperature top_p parallel_tool_calls kvlite "
        "kvlite.budget prompt background conversation model",
    ),
    "/api/chat": (
        {**MESSAGES, "stream": False, "options": {"num_predict": 1}},
        f"{TALK} {OLLAMA} tools messages.0.images messages.0.thinking messages.0.tool_name",
    ),
    "/api/generate": (
        {"prompt": "Hi", "stream": False, "options": {"num_predict": 1}},
        f"{OLLAMA} prompt system images suffix template raw context kvlite.budget kvlite.method",
    ),
}
VALUES: list[Any] = [
    *(-7, 2.5, 10**30, True, "x", "é" * 2000),
    *([], [5], [{}], ["a", None], [[["x"]]], [{"type": "text"}], [{"role": "user"}]),
    *({}, {"a": 1}, {"type": "x"}, {"type": 5}, {"name": [1]}),
    [{"role": "assistant", "content": [{"type": "tool_use"}]}],
    [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}],
]
# Bodies of no dialect, and what a page of elsewhere sends.
OF_CHATS = ("a surrogate", "a message twice")
BYTES = {
    name: (body, status)
    for name, (body, status, _) in BODIES.items()
    if isinstance(body, bytes) and name not in OF_CHATS
}
HEADERS = [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Host": ""}]


def require_own_shape(path: str, status: int, text: str, where: str) -> str:
    """The sentence of a refusal, which has the shape of the dialect and nothing of the code."""
    assert 400 <= status < 500, where
    assert len(text) < 1500 and "Traceback" not in text and ".py" not in text, where
    error = json.loads(text)
    inner = error["error"]
    if path.startswith("/api"):
        assert {*error} == {"error"}, where
        sentence = inner
    else:
        if path.startswith("/v1/messages"):
            assert {*error} == {"type", "error"} and error["type"] == "error", where
            assert {*inner} == {"type", "message"}, where
        else:
            assert {*error} == {"error"}, where
            assert {*inner} == {"message", "type", "param", "code"}, where
        sentence = inner["message"]
    assert isinstance(sentence, str) and sentence, where
    return sentence


def placed(good: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """A request whose field holds a value."""
    made: Any = deepcopy(good)
    *before, last = (int(each) if each.isdecimal() else each for each in field.split("."))
    within = made
    for each in before:
        within = within.setdefault(each, {}) if isinstance(within, dict) else within[each]
    within[last] = value
    return dict(made)


@pytest.mark.parametrize("path", [*DIALECTS, "/v1/messages/count_tokens", "/api/show"])
def test_what_is_no_request_is_refused(server: Server, path: str) -> None:
    for name, (body, status) in BYTES.items():
        found = server.http.post(path, content=body)
        assert found.status_code == status, f"{name}: {found.text[:200]}"
        require_own_shape(path, found.status_code, found.text, name)
    for headers in HEADERS:
        found = server.http.post(path, json={}, headers=headers)
        assert found.status_code == 403
        require_own_shape(path, found.status_code, found.text, str(headers))
    for method in ("GET", "PUT", "PATCH"):
        found = server.http.request(method, path)
        assert found.status_code == 405
        require_own_shape(path, found.status_code, found.text, method)


@pytest.mark.long
@pytest.mark.parametrize("path", DIALECTS)
def test_any_value_is_answered_or_refused(server: Server, path: str) -> None:
    """In sixty sentences or more that differ in more than in numbers and in what was sent."""
    good, fields = DIALECTS[path]
    sentences = set[str]()
    for field in fields.split():
        for value in VALUES:
            found = server.http.post(path, json=placed(good, field, value))
            where = f"{field}: {str(value)[:60]}: {found.status_code} {found.text[:200]}"
            if found.status_code == 200:
                continue
            sentence = require_own_shape(path, found.status_code, found.text, where)
            sentences.add(re.sub(r"'.*'|\d+", "_", sentence))
    assert len(sentences) >= 60, sorted(sentences)
