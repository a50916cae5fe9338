"""What is refused, and how: in OpenAI's shape, without a traceback."""

import json
import logging
import socket
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import openai
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.server.config import ServerConfig
from kvlite.server.fields import Chat, Completion, ResponseRequest
from kvlite.server.refusals import in_fields, refusal_of
from kvlite.web.sending import LONGEST
from tests.server.conftest import Server, said, serving

HI: list[Any] = said("Hi")
CHAT = "/v1/chat/completions"
PNG = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}

# What is sent, the status, and what the message says.
BODIES: dict[str, tuple[Any, int, str]] = {
    "nothing": (b"", 400, "not JSON"),
    "no JSON": (b"{", 400, "not JSON"),
    "a list": (b"[]", 400, "not a JSON object"),
    "latin-1": ('{"messages": "é"}'.encode("latin-1"), 400, "not UTF-8"),
    "NaN": (b'{"messages": [], "temperature": NaN}', 400, "not a number"),
    "deep": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested too deeply"),
    "many": (b'{"messages": [' + b"[]," * 1_500_000 + b"[]]}", 413, "at most"),
    "no messages": ({}, 400, "messages is missing"),
    "no role": ({"messages": [{"content": "Hi"}]}, 400, "messages[0].role is missing"),
    "an unknown role": (
        {"messages": [{"role": "god", "content": "Hi"}]},
        400,
        "role is not system, developer, user, assistant, tool or function",
    ),
    "a number as content": (
        {"messages": [{"role": "user", "content": 1}]},
        400,
        "messages[0].content is not a text or a list",
    ),
    "a part without a type": (
        {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]},
        400,
        "messages[0].content[0].type is missing",
    ),
    "no content": ({"messages": [{"role": "user"}]}, 400, "messages[0] has no content"),
    "null": ({"messages": [*HI, {"role": "user", "content": None}]}, 400, "messages[1] has no"),
    "a function": ({"messages": [{"role": "function", "content": "1"}]}, 400, "role tool"),
    "an image": ({"messages": [{"role": "user", "content": [PNG]}]}, 400, "'image_url'"),
    "an unknown model": ({"messages": HI, "model": "gpt-4"}, 404, "no model 'gpt-4'"),
    "a model without end": ({"messages": HI, "model": "x" * 1001}, 400, "than 1,000 characters"),
    "hot": ({"messages": HI, "temperature": 99}, 400, "temperature 99"),
    "warm in words": ({"messages": HI, "temperature": "warm"}, 400, "is not a number"),
    "a truth": ({"messages": HI, "temperature": True}, 400, "temperature is not"),
    "no tokens": ({"messages": HI, "max_tokens": -2}, 400, "max_tokens -2"),
    "too many digits": (
        b'{"messages": [], "seed": ' + b"9" * 9000 + b"}",
        400,
        "seed has a number of 9,000 digits",
    ),
    "n": ({"messages": HI, "n": 0}, 400, "n 0"),
    "stop": ({"messages": HI, "stop": [1]}, 400, "stop[0] is not a text"),
    "many stops": ({"messages": HI, "stop": ["a"] * 99}, 400, "99 stop strings"),
    "presence": ({"messages": HI, "presence_penalty": 3}, 400, "presence_penalty 3"),
    "bias": ({"messages": HI, "logit_bias": {"5": 101}}, 400, "logit_bias '5:101"),
    "bias of a word": ({"messages": HI, "logit_bias": {"heron": 1}}, 400, "logit_bias 'heron"),
    "bias of nothing": ({"messages": HI, "logit_bias": {"9999999": 1}}, 400, "9999999 is not in"),
    "many of them": ({"messages": HI, "logprobs": True, "top_logprobs": 99}, 400, "99"),
    "top_logprobs": ({"messages": HI, "top_logprobs": 2}, 400, "needs logprobs"),
    "tools": ({"messages": HI, "tools": [{"type": "function"}]}, 400, "tools[0].name is missing"),
    "tools that must be called": (
        {"messages": HI, "tools": [{"type": "function", "name": "a"}], "tool_choice": "required"},
        400,
        "template has no tools",
    ),
    "no tool": ({"messages": HI, "tool_choice": "required"}, 400, "there is none"),
    "xml": ({"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format 'xml'"),
    "a wrong schema": (
        {"messages": HI, "response_format": {"type": "json_schema", "schema": {"type": "int"}}},
        400,
        "Invalid type: int",
    ),
    "a schema of elsewhere": (
        {
            "messages": HI,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"$ref": "file:///etc/passwd"}},
            },
        },
        400,
        "does not fetch",
    ),
    "a setting": ({"messages": HI, "kvlite": {"budget": "lots"}}, 400, "kvlite.budget 'lots' is"),
    "no setting": ({"messages": HI, "kvlite": {"colour": 1}}, 400, "kvlite.colour"),
    "not theirs": ({"messages": HI, "kvlite": {"model": "x"}}, 400, "kvlite.model"),
    "a method": ({"messages": HI, "kvlite": {"method": "magic"}}, 400, "magic"),
    "options as text": (
        {"messages": HI, "stream": True, "stream_options": "x"},
        400,
        "is not an obj",
    ),
    "too long": ({"messages": said("heron " * 2000)}, 400, "do not fit"),
    "far too long": ({"messages": said("x" * 9_000_000)}, 400, "do not fit"),
    "a surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}], "n": 0}', 400, "n 0"),
    "speech": ({"messages": HI, "modalities": ["text", "audio"]}, 400, "text alone"),
    "an endless number": (
        b'{"messages": [{"role": "user", "content": ""}], "temperature": 1e999}',
        400,
        "temperature is 1e999, too large",
    ),
    "a schema without end": (
        {"messages": HI, "response_format": {"type": "json_schema", "schema": {"$ref": "#"}}},
        400,
        "refers to itself",
    ),
    "a byte order mark": (b"\xef\xbb\xbf{}", 400, "not JSON"),
    "a message twice": (
        b'{"messages": [{"role": "user", "content": "Hi"}], "messages": []}',
        400,
        "empty",
    ),
    "misspelled": (
        {"messages": HI, "temprature": 0.5},
        400,
        "temprature is not a field: did you mean temperature?",
    ),
    "as Hugging Face has it": ({"messages": HI, "max_new_tokens": 5}, 400, "mean max_tokens?"),
    "a tool misspelled": (
        {"messages": HI, "tools": [{"type": "function", "function": {"names": "a"}}]},
        400,
        "tools[0].names is not a field: did you mean name?",
    ),
}


def require_error(answer: httpx.Response, status: int, words: str) -> dict[str, Any]:
    """OpenAI's shape, and nothing of how it came to be."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert status != 400 or error["type"] == "invalid_request_error"
    assert words in error["message"] and len(error["message"]) < 1000
    assert "Traceback" not in answer.text and ".py" not in answer.text
    return dict(error)


@pytest.mark.parametrize("name", BODIES)
def test_bad_input_is_refused_in_a_sentence(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    body, status, words = BODIES[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with caplog.at_level(logging.WARNING):
        answer = server.http.post(CHAT, content=content)
    error = require_error(answer, status, words)
    assert not caplog.records
    assert isinstance(body, bytes) or error["param"] in {*body, "messages"}
    assert server.state.counters.waiting == 0


def test_fields_of_other_servers_are_ignored(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenAI's own, some of vLLM's, llama.cpp's and open-webui's, and what is beside its like."""
    others = (
        "min_tokens",
        "top_a",
        "repeat_penalty",
        "session_id",
        "models",
        "mode",
        "parse_tool_calls",
    )
    beside = {"max_tokens": 1, "max_new_tokens": 1, "temperature": 0, "temperature_last": True}
    for path, kind, params, body in (
        (CHAT, Chat, chat_params, {"messages": HI, **beside}),
        ("/v1/completions", Completion, completion_params, {"prompt": "Hi", **beside}),
        ("/v1/responses", ResponseRequest, response_params, {"input": "Hi"}),
    ):
        base = next(each for each in vars(params) if each.endswith("CreateParamsNonStreaming"))
        names = {*get_type_hints(getattr(params, base))} - {*kind.model_fields}
        sent = dict.fromkeys([*names, *others], "any")
        caplog.clear()
        with caplog.at_level(logging.INFO):
            answer = server.http.post(path, json=body | sent)
        assert answer.status_code == 200, answer.text
        (told,) = (each for each in caplog.messages if each.startswith("fields that mean nothing"))
        assert "user" in names and all(name in told for name in sent)
    many = {f"temperatur{number}": 1 for number in range(10_000)} | {"\n": 1, "a" * 9999: 1}
    assert server.http.post(CHAT, json={"messages": HI, "temperature": 0, **many}).is_success


def test_what_is_longer_is_refused_before_it_is_sent(server: Server) -> None:
    host, _, port = server.address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sending:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {LONGEST + 1}\r\n\r\n"
        sending.sendall(head.encode())
        assert b"413" in sending.recv(1000).split(b"\r\n")[0]


def test_addresses_that_are_not_here(server: Server) -> None:
    require_error(server.http.get("/v1/batches"), 404, "GET /v1/batches is not here")
    found = server.http.get("/")
    assert found.status_code == 200 and "`kvlite app`" in found.text
    assert server.http.head("/").status_code == 200, "as Ollama's own program asks"
    require_error(server.http.get(CHAT), 405, "is not here")
    require_error(server.http.get("/v1/models/gpt-4"), 404, "no model 'gpt-4'")
    require_error(server.http.get("/v1/models/../../etc/passwd"), 404, "")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:8000"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Referer": "http://evil.example/page"},
    ],
)
def test_pages_of_elsewhere_are_refused(server: Server, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/health", "/metrics"):
        require_error(server.http.get(path, headers=headers), 403, "")
    require_error(server.http.post(CHAT, json={"messages": HI}, headers=headers), 403, "")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "LOCALHOST:9", "[::1]:8000"])
def test_names_of_this_machine_are_not(server: Server, host: str) -> None:
    assert server.http.get("/health", headers={"Host": host}).status_code == 200


def test_a_key_is_demanded(settings: Settings, tmp_path: Path) -> None:
    config = ServerConfig(keys=["secret-1", "secret-2"], folder=tmp_path, requests=1)
    with serving(settings, config) as server:
        for given in (None, "secret", "secret-11", "sécret-1"):
            headers = {} if given is None else {"Authorization": f"Bearer {given}".encode()}
            answer = server.http.get("/v1/models", headers=headers)
            require_error(answer, 401, "Authorization: Bearer")
        for key in ("secret-1", "secret-2"):
            client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0)
            assert client.models.list().data
        wrong = openai.OpenAI(base_url=f"{server.address}/v1", api_key="no", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def tuple_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("http://").partition(":")
    return host, int(port)


def test_others_come_in_by_a_key_alone() -> None:
    with pytest.raises(SettingError, match=r"--host 0\.0\.0\.0 lets others in"):
        ServerConfig("0.0.0.0").require_key()
    ServerConfig("0.0.0.0", keys=["a"]).require_key()
    for key in ("", " a", "clé"):
        with pytest.raises(SettingError, match="--api-key"):
            ServerConfig(keys=[key]).require_key()


def test_a_model_that_is_not_there_says_so(settings: Settings, tmp_path: Path) -> None:
    wrong = settings.replace({"weights": "gguf"})
    with serving(wrong, ServerConfig(folder=tmp_path), loaded=False) as server:
        assert server.model.loading is not None and server.model.loading.ended.wait(60)
        answer = server.http.post(CHAT, json={"messages": HI})
        told = require_error(answer, 500, "the model cannot be used: the server's --weights gguf")
        assert "leave the server's --weights out" in told["message"]
        assert server.http.get("/v1/models").status_code == 200


def test_errors_speak_of_fields(server: Server) -> None:
    said = in_fields("--kv-bits 2 and --max-tokens 5: --top-p, --schema, --stop or --vram")
    assert said == (
        "kvlite.kv_bits 2 and max_tokens 5: top_p, response_format, stop or the server's --vram"
    )
    body = {"messages": HI, "kvlite": {"kv_bits": "kivi4", "method": "kvx"}}
    told = require_error(server.http.post(CHAT, json=body), 400, "kvlite.kv_bits kivi4")
    assert "--" not in told["message"]
    assert refusal_of(SettingError("--vram 1 is less")).param is None
    assert in_fields("run `pip install --no-deps a`") == "run `pip install --no-deps a`"
    form = {"response_format": {"type": "json_object"}, "max_tokens": 1}
    body = {"messages": HI, "kvlite": {"speculate": "off"}, **form}
    ledger = server.http.post(CHAT, json=body).json()["usage"]["kvlite"]
    assert ledger["no_speculation"] == "kvlite.speculate off"
    assert ledger["failure"].endswith("what response_format asks for: raise max_tokens")
