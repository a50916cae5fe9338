"""Ollama's API by plain HTTP: chats, prompts, tools, reasoning, and what models are."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from kvlite.server.fields import Chat
from kvlite.server.ollama import OllamaChat, OllamaGenerate
from tests.server.conftest import Server, said, serving, with_template
from tests.server.test_reasoning import TEMPLATE as REASONS
from tests.server.test_tools import TEMPLATE as CALLS
from tests.server.test_tools import TOOLS, require_call

LONG = {"num_predict": 4, "temperature": 0}
FIELDS = {"model", "created_at", "done"}
LAST = {
    *(f"{name}_duration" for name in ("total", "load", "prompt_eval", "eval")),
    *("done_reason", "prompt_eval_count", "eval_count"),
}


@pytest.fixture(scope="module")
def able(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model with a template that has tools."""
    folder = tmp_path_factory.mktemp("able")
    settings = Settings(model=str(with_template(tiny_folder, folder, CALLS)), max_new_tokens=90)
    with serving(settings, ServerConfig(folder=folder)) as found:
        yield found


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(each) for each in answer.text.splitlines()]


def require_refused(answer: httpx.Response, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    (told,) = answer.json().values()
    assert [*answer.json()] == ["error"] and words in told, told


def openai_text(server: Server, **given: Any) -> str:
    body = {"messages": said("Hi"), "max_tokens": 4, "temperature": 0, **given}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    return str(answer["choices"][0]["message"]["content"])


def test_a_chat_is_streamed_unless_that_is_declined(server: Server) -> None:
    body = {"model": "tiny:latest", "messages": said("Hi"), "options": LONG}
    lines = lines_of(server.http.post("/api/chat", json=body))
    *pieces, last = lines
    assert pieces and all({*each} == {*FIELDS, "message"} and not each["done"] for each in pieces)
    assert {*last} == {*FIELDS, *LAST, "message"} and last["done"]
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["done_reason"] == "length" and last["eval_count"] == 4
    assert last["model"] == "tiny:latest" and last["prompt_eval_count"] > 1
    assert all(type(last[name]) is int and last[name] > 0 for name in LAST - {"done_reason"})
    assert last["total_duration"] >= last["eval_duration"] + last["load_duration"]
    text = "".join(each["message"]["content"] for each in lines)
    assert text == openai_text(server)
    whole = server.http.post("/api/chat", json={**body, "stream": False}).json()
    assert {*whole} == {*last} and whole["message"] == {"role": "assistant", "content": text}


def test_a_prompt_is_answered(server: Server) -> None:
    body = {"model": "tiny", "prompt": "Hi", "options": LONG}
    lines = lines_of(server.http.post("/api/generate", json=body))
    text = "".join(each["response"] for each in lines)
    assert text == openai_text(server) and lines[-1]["done_reason"] == "length"
    whole = server.http.post(
        "/api/generate", json={**body, "stream": False, "system": "Be brief. " * 30}
    )
    assert whole.json()["prompt_eval_count"] > lines[-1]["prompt_eval_count"]


def test_options_are_those_of_a_chat(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    options = {
        "num_predict": -2,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "stop": ["a"],
        "temperature": 1,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "num_ctx": 4096,
    }
    with caplog.at_level(logging.INFO):
        made = OllamaGenerate(prompt="Hi", options=options).chat()
    assert made is not None and "num_ctx" in caplog.text and "top_k" not in caplog.text
    assert made.longest is None and made.repetition_penalty == 1.2
    assert (made.top_p, made.top_k, made.min_p, made.seed) == (0.5, 7, 0.1, 5)
    assert (made.stop, made.temperature, made.presence_penalty) == (["a"], 1, 0.5)
    caplog.clear()
    body = {"prompt": "Hi", "options": LONG, "keep_alive": "5m"}
    with caplog.at_level(logging.INFO):
        assert lines_of(server.http.post("/api/generate", json=body))[-1]["done"]
    assert "keep_alive" in caplog.text


def test_an_answer_follows_a_schema(server: Server) -> None:
    body = {"messages": said("Which?"), "stream": False, "format": {"enum": ["red", "blue"]}}
    made = server.http.post("/api/chat", json=body).json()
    assert made["message"]["content"] in ('"red"', '"blue"') and made["done_reason"] == "stop"
    followed = {"type": "json_object"}
    either: tuple[Any, ...] = ("json", {})
    for given in either:
        chat = OllamaGenerate(prompt="Hi", format=given).chat()
        assert chat is not None and chat.response_format == followed
    empty = OllamaGenerate(prompt="Hi", format="").chat()
    assert empty is not None and empty.response_format is None


def test_reasoning_is_told_apart(tiny_folder: Path, tmp_path: Path) -> None:
    settings = Settings(model=str(with_template(tiny_folder, tmp_path, REASONS)), max_new_tokens=90)
    schema = {"enum": ["red", "blue"]}
    body: dict[str, Any] = {
        "messages": said("Which?"),
        "format": schema,
        "options": {"num_predict": 20},
    }
    with serving(settings.replace({"reasoning_budget": 5}), ServerConfig(folder=tmp_path)) as found:
        lines = lines_of(found.http.post("/api/chat", json={**body, "think": True}))
        thought = "".join(each["message"].get("thinking", "") for each in lines)
        text = "".join(each["message"]["content"] for each in lines)
        assert thought and text in ('"red"', '"blue"')
        body["stream"] = False
        whole = found.http.post("/api/chat", json={**body, "think": "low"}).json()["message"]
        assert whole["thinking"] and whole["content"] in ('"red"', '"blue"')
        off = found.http.post("/api/chat", json={**body, "think": False}).json()["message"]
        assert {*off} == {"role", "content"} and off["content"] in ('"red"', '"blue"')
        prompt = {"prompt": "Which?", **body, "messages": None}
        assert found.http.post("/api/generate", json=prompt).json()["thinking"]
        require_refused(
            found.http.post("/api/chat", json={**body, "think": "lots"}), 400, "think '"
        )
        assert found.http.post("/api/show", json={"model": found.model.names[0]}).json()[
            "capabilities"
        ] == ["completion", "thinking"]


def test_tools_are_called_and_their_results_go_back_by_name(able: Server) -> None:
    shown = able.http.post("/api/show", json={"name": able.model.names[0]}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    real = OllamaChat.chat

    def needs_one(fields: OllamaChat) -> Chat:
        made = real(fields)
        assert made is not None
        return made.model_copy(update={"tool_choice": "required"})

    body: dict[str, Any] = {"messages": said("Weather?"), "tools": TOOLS[:1]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OllamaChat, "chat", needs_one)
        lines = lines_of(able.http.post("/api/chat", json=body))
        whole = able.http.post("/api/chat", json={**body, "stream": False}).json()
        cut = {**body, "stream": False, "options": {"num_predict": 9}}
        cut = able.http.post("/api/chat", json=cut).json()
    streamed = [each for line in lines for each in line["message"].get("tool_calls", ())]
    for found in (streamed, whole["message"]["tool_calls"]):
        for call in found:
            require_call(call["function"]["name"], json.dumps(call["function"]["arguments"]))
    assert streamed and whole["message"]["tool_calls"] and whole["done_reason"] == "stop"
    assert "tool_calls" not in cut["message"] and cut["done_reason"] == "length"
    calls = [
        {"function": {"name": "weather", "arguments": {"place": place}}}
        for place in ("Rome", "Oslo")
    ]
    messages: Any = [
        *said("Weather?"),
        {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "Two."},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
        {"role": "tool", "tool_name": "clock", "content": "noon"},
    ]
    made = OllamaChat.model_validate({"messages": messages, "tools": TOOLS}).chat()
    assert made is not None and made.messages[1].reasoning_content == "Two."
    ids = [call.id for call in made.messages[1].tool_calls or () if call]
    assert [each.tool_call_id for each in made.messages[2:]] == [*ids, None] and len({*ids}) == 2
    assert [each.name for each in made.messages[2:]] == ["weather", "weather", "clock"]
    body = {"messages": messages, "tools": TOOLS, "options": LONG, "stream": False}
    answer = able.http.post("/api/chat", json=body).json()
    assert answer["done"] and answer["prompt_eval_count"] > 100


def test_models_are_listed_and_shown(server: Server) -> None:
    (first, *_) = server.http.get("/api/tags").json()["models"]
    assert first["name"] == first["model"] == "tiny" and first["size"] > 1000
    assert len(first["digest"]) == 64 and first["details"]["family"]
    (running,) = server.http.get("/api/ps").json()["models"]
    assert running["context_length"] == 1024 and running["size"] > 1000
    assert running["size_vram"] == 0, "it is on a CPU"
    assert running["expires_at"] > running["modified_at"]
    shown = server.http.post("/api/show", json={"model": "tiny"}).json()
    kind = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{kind}.context_length"] == 1024
    assert (
        shown["model_info"][f"{kind}.embedding_length"]
        and shown["model_info"]["general.parameter_count"]
    )
    assert "completion" in shown["capabilities"] and shown["details"] == first["details"]
    found = server.http.get("/api/version").json()["version"]
    assert [int(each) for each in found.split(".")] > [0, 6, 4]
    require_refused(server.http.post("/api/show", json={"model": "gpt-4"}), 404, "no model 'gpt-4'")


def test_a_model_that_is_asked_for_nothing_is_there(server: Server) -> None:
    sent = {"model": "tiny", "messages": []}
    for path, field in (("chat", "message"), ("generate", "response")):
        (only,) = lines_of(server.http.post(f"/api/{path}", json=sent))
        assert only["done"] and only["done_reason"] == "load" and field in only


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings", "/v1/embeddings"])
def test_there_are_no_embeddings(server: Server, path: str) -> None:
    answer = server.http.post(path, json={"model": "tiny", "input": "Hi"})
    assert answer.status_code == 501
    told = answer.json()["error"]
    assert "llama-server --embeddings" in (told["message"] if path.startswith("/v1") else told)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "gpt-4"}, 404, "no model 'gpt-4'"),
        ({"options": {"temperature": "warm"}}, 400, "temperature is not a number"),
        ({"options": {"temprature": 1}}, 400, "did you mean temperature?"),
        ({"options": {"num_predict": -7}}, 400, "num_predict -7"),
        ({"options": {"repeat_penalty": -1}}, 400, "repeat_penalty -1"),
        ({"options": [1]}, 400, "options is not an object"),
        ({"format": "xml"}, 400, "format 'xml' is not json or a JSON Schema"),
        ({"format": {"type": "int"}}, 400, "Invalid type: int"),
        ({"think": "lots"}, 400, "think 'lots' is none of"),
        ({"messages": [{"role": "god", "content": "Hi"}]}, 400, "messages[0].role is not"),
        ({"messages": [{"role": "user", "images": ["a"]}]}, 400, "messages[0].images: this server"),
        ({"messages": said("heron " * 2000)}, 400, "do not fit"),
        ({"tools": ["clock"]}, 400, "tools[0] is of type"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_bad_input_is_refused_in_a_sentence(
    server: Server, body: dict[str, Any], status: int, words: str, stream: bool
) -> None:
    sent = {"messages": said("Hi"), "stream": stream, **body}
    require_refused(server.http.post("/api/chat", json=sent), status, words)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"raw": True}, "send the prompt to /v1/completions"),
        ({"suffix": "b"}, "suffix is not supported"),
        ({"template": "{{ .Prompt }}"}, "the model's own is used"),
        ({"context": [1]}, "send the messages to /api/chat"),
        ({"images": ["a"]}, "leave images out"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused(
    server: Server, field: dict[str, Any], words: str
) -> None:
    require_refused(server.http.post("/api/generate", json={"prompt": "a", **field}), 400, words)


def test_other_addresses_are_not_here(server: Server) -> None:
    require_refused(server.http.post("/api/pull", json={}), 404, "POST /api/pull is not here")
