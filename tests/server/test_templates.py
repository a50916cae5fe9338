"""Chat templates over HTTP: histories with control tokens in them, variables, answers that were
begun, and templates that refuse or fail."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from tests.server.conftest import Server, serving
from tests.server.test_refusing import require_error

CHAT = "/v1/chat/completions"
# Asks for content's truth, prints calls, and fails or refuses where it is told.
TEMPLATE = (
    "{% if style %}<|im_start|>system\nSpeak {{ style }}.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.content == 'No!' %}{{ raise_exception('I take no No.') }}"
    "{% elif m.content == 'Fail' %}{{ nothing.at_all }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{% if m.content %}{{ m.content }}{% elif m.tool_calls %}{% for c in m.tool_calls %}<tool_call>"
    "\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "read_file"}}
USER = {"role": "user", "content": "What does the file say?"}
TOKEN = "Each turn ends with <|im_end|> there, a call begins with <tool_call>."


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("templates")
    (folder / "own.jinja").write_text(TEMPLATE)
    settings = Settings(
        model=str(tiny_folder), max_new_tokens=2, chat_template=str(folder / "own.jinja")
    )
    with serving(settings, ServerConfig(folder=folder)) as found:
        yield found


def call(arguments: Any = '{"path": "a.txt"}', **fields: Any) -> dict[str, Any]:
    made = {"id": "c1", "type": "function", "function": {"name": "read_file"}}
    made["function"] = {"name": "read_file", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [made], **fields}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content}


def shown(server: Server, messages: list[Any], **fields: Any) -> str:
    """What the model is told."""
    made = server.http.post("/tokenize", json={"messages": messages, **fields})
    assert made.status_code == 200, made.text
    told = server.http.post("/detokenize", json={"tokens": made.json()["tokens"]}).json()
    return str(told.get("prompt", told.get("content")))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": TOKEN}],
        [USER, call(content=None), result("hello")],
        [USER, call(content=None), result(TOKEN)],
        [USER, call(content=""), result(TOKEN)],
        [USER, call(content="Let me look."), result(TOKEN)],
        [{"role": "user", "content": TOKEN}, call(content=None), result("hello")],
        [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": TOKEN}],
        [USER, call('{"path": "<|im_end|>"}', content=None), result(TOKEN)],
        [USER, call({"path": "a.txt"}, content=None), result("an object")],
        [USER, call("not JSON <|im_end|>"), result(None)],
        [USER, {**call(), "id": None, "tool_calls": [*call()["tool_calls"], None]}, result("x")],
        [USER, {"role": "assistant", "content": "Yes.", "tool_calls": None}, USER],
    ],
)
def test_histories_are_answered_whatever_is_in_them(server: Server, messages: list[Any]) -> None:
    for tools in ({}, {"tools": [TOOL]}):
        made = server.http.post(CHAT, json={"messages": messages, **tools})
        assert made.status_code == 200, made.text
    ids = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    end = server.model.ready().tokenizer.convert_tokens_to_ids("<|im_end|>")
    # This template shows no calls beside text, so that they get a message of their own.
    apart = sum(bool(each.get("content") and each.get("tool_calls")) for each in messages)
    assert ids.count(end) == len(messages) + apart


def test_variables_reach_the_template_as_characters(server: Server) -> None:
    given = {"chat_template_kwargs": {"style": "<|im_end|>loud", "messages": []}}
    text = shown(server, [USER], **given)
    assert text.startswith("<|im_start|>system\nSpeak <|im_end|>loud.<|im_end|>\n")
    counts = [
        server.http.post(CHAT, json={"messages": [USER], **each}).json()["usage"]["prompt_tokens"]
        for each in ({}, given)
    ]
    assert counts[1] > counts[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("No!", "this model's chat template refuses these messages: I take no No."),
        ("Fail", "chat template cannot be used (UndefinedError: 'nothing' is undefined)"),
    ],
)
def test_what_a_template_raises_is_the_requests_fault(
    server: Server, content: str, words: str
) -> None:
    messages = [{"role": "user", "content": content}]
    error = require_error(server.http.post(CHAT, json={"messages": messages}), 400, words)
    assert error["param"] == "messages"
    require_error(server.http.post("/v1/responses", json={"input": content}), 400, words)


def test_an_answer_that_was_begun_goes_on(server: Server) -> None:
    begun = [USER, {"role": "assistant", "content": "Sure: red, <|im_end|> and "}]
    body = {"messages": begun, "max_tokens": 1, "temperature": 0}
    told = [
        server.http.post(CHAT, json={**body, **each}).json()["usage"]["prompt_tokens"]
        for each in ({}, {"continue_final_message": True, "add_generation_prompt": False})
    ]
    anew = server.http.post(CHAT, json={**body, "continue_final_message": False}).json()
    assert told[0] == told[1] < anew["usage"]["prompt_tokens"]
    both = {**body, "continue_final_message": True, "add_generation_prompt": True}
    require_error(server.http.post(CHAT, json=both), 400, "leave one out")
    asked = {**body, "messages": [USER], "continue_final_message": True}
    require_error(server.http.post(CHAT, json=asked), 400, "no answer that could go on")


@pytest.mark.parametrize(
    "content",
    [
        "Yes,",
        "Yes, ",
        "  Yes\n\n",
        [{"type": "text", "text": "Yes,"}, {"type": "text", "text": " and"}],
        "<think>\nHm",
        "<think>\nHm\n</think>\n\nYes",
        "",
        None,
        " ",
        [],
    ],
)
def test_an_answer_goes_on_exactly_where_it_was_begun(server: Server, content: Any) -> None:
    begun = [USER, {"role": "assistant", "content": content}]
    text = content or ""
    if isinstance(text, list):
        text = "\n".join(each["text"] for each in text)
    end = "assistant\n" + (text if text.strip() else "")
    assert shown(server, begun).endswith(end)
    counts = set()
    for given in ({}, {"tools": [TOOL]}, {"add_generation_prompt": False}):
        body = {"messages": begun, **given}
        whole = server.http.post(CHAT, json=body | {"n": 2, "temperature": 1, "seed": 3})
        assert whole.status_code == 200, whole.text
        counts.add(whole.json()["usage"]["prompt_tokens"])
    (count,) = counts
    ids = server.http.post("/tokenize", json={"messages": begun}).json()["tokens"]
    assert count == len(ids)
    streamed = server.http.post(CHAT, json=body | {"stream": True, "n": 2})
    roles = [line for line in streamed.text.splitlines() if '"role"' in line]
    assert len(roles) == 2 and not any("Yes" in line for line in roles)


def test_a_form_is_of_a_whole_answer(server: Server) -> None:
    form = {"response_format": {"type": "json_object"}}
    body = {"messages": [USER, {"role": "assistant", "content": "{"}], **form}
    require_error(server.http.post(CHAT, json=body), 400, "the last message has begun it")
    body["messages"] = [USER, {"role": "assistant", "content": " "}]
    assert server.http.post(CHAT, json=body).status_code == 200


def test_no_request_brings_a_template(server: Server) -> None:
    for path in (CHAT, "/tokenize"):
        for template in ("{{ 1 }}", "/etc/passwd"):
            body = {"messages": [USER], "chat_template": template}
            require_error(server.http.post(path, json=body), 400, "for whoever starts the server")
    own = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    assert shown(server, [USER], **own) == shown(server, [USER], chat_template="")


def test_an_answer_begins_anew_where_that_is_said(server: Server) -> None:
    begun = [USER, {"role": "assistant", "content": "Yes,"}]
    for given in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        assert shown(server, begun, **given).endswith("Yes,<|im_end|>\n<|im_start|>assistant\n")
    for path in (CHAT, "/tokenize"):
        body = {"messages": [USER], "add_generation_prompt": False}
        require_error(server.http.post(path, json=body), 400, "an answer begins with one")
