"""Whatever a field holds, each dialect answers, or refuses in its own shape; nothing else."""

from typing import Any

import pytest

from tests.server.conftest import Server, said

MESSAGES = {"messages": said("Hi")}
# Each dialect's address, a good request, and fields that it knows.
DIALECTS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/messages": (
        {**MESSAGES, "max_tokens": 1},
        "model messages system max_tokens stop_sequences stream temperature top_p top_k tools "
        "tool_choice thinking output_config output_format kvlite",
    ),
    "/v1/chat/completions": (
        {**MESSAGES, "max_tokens": 1},
        "messages tools tool_choice response_format stop logit_bias logprobs n kvlite functions "
        "stream_options chat_template_kwargs reasoning_effort thinking seed max_tokens",
    ),
    "/v1/responses": (
        {"input": "Hi", "max_output_tokens": 1},
        "input instructions tools tool_choice text include reasoning previous_response_id store "
        "metadata max_output_tokens temperature parallel_tool_calls kvlite prompt",
    ),
    "/api/chat": (
        {**MESSAGES, "stream": False, "options": {"num_predict": 1}},
        "model messages stream options format think tools",
    ),
    "/api/generate": (
        {"prompt": "Hi", "stream": False, "options": {"num_predict": 1}},
        "prompt system stream options format think images suffix template raw context",
    ),
}
VALUES: list[Any] = [
    *(-7, 2.5, 10**30, True, "x", "é" * 2000),
    *([], [5], [{}], ["a", None], [[["x"]]], [{"type": "text"}], [{"role": "user"}]),
    *({}, {"a": 1}, {"type": "x"}, {"type": 5}, {"name": [1]}),
    [{"role": "assistant", "content": [{"type": "tool_use"}]}],
    [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}],
]


def has_own_shape(path: str, error: dict[str, Any]) -> bool:
    inner = error.get("error")
    if path == "/v1/messages":
        return error.get("type") == "error" and {*inner} == {"type", "message"}  # type: ignore[misc]
    if path.startswith("/api"):
        return {*error} == {"error"} and isinstance(inner, str)
    return isinstance(inner, dict) and {*inner} == {"message", "type", "param", "code"}


@pytest.mark.long
@pytest.mark.parametrize("path", DIALECTS)
def test_any_value_is_answered_or_refused(server: Server, path: str) -> None:
    good, fields = DIALECTS[path]
    refused = 0
    for field in fields.split():
        for value in VALUES:
            found = server.http.post(path, json={**good, field: value})
            where = f"{field}: {str(value)[:60]}: {found.status_code} {found.text[:200]}"
            if found.status_code == 200:
                continue
            assert 400 <= found.status_code < 500, where
            assert len(found.text) < 1500 and "Traceback" not in found.text, where
            assert has_own_shape(path, found.json()), where
            refused += 1
    assert refused >= 60
