"""Kinds of bad input, each in every dialect: refused in a sentence, and nobody else waits."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.jobs.rows import json_rows
from kvlite.model.answers.form import Tool
from kvlite.model.answers.schemas import followed
from kvlite.server.batch_file import tasks_of_requests
from kvlite.server.config import ServerConfig
from kvlite.web import sending
from tests.server.conftest import Server, said, serving
from tests.server.test_refusing import require_error

# Each dialect's address, a good request, and its field for the length of an answer.
DIALECTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": said("Hi")}, "max_tokens"),
    "newer": ("/v1/chat/completions", {"messages": said("Hi")}, "max_completion_tokens"),
    "completions": ("/v1/completions", {"prompt": "Hi there"}, "max_tokens"),
    "responses": ("/v1/responses", {"input": "Hi"}, "max_output_tokens"),
}
NAMES = [f"name{each}" for each in range(8000)]
# What JSON cannot say back, and what is said of it.
UNSAYABLE = {
    "NaN": "which is not a number",
    "-Infinity": "which is not a number",
    "1e999": "too large",
    "9" * 5000: "5,000 digits",
    '"\\ud800"': "half a character",
    '{"\\udfff": 1}': "half a character",
    '[{"a": [1e400]}]': "too large",
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("chat", value) for value in UNSAYABLE),
        *((path, "1e999") for path in (*DIALECTS, "tokenize")),
    ],
)
def test_what_json_cannot_say_back_is_refused_by_its_field(
    server: Server, path: str, value: str
) -> None:
    address, good, _ = DIALECTS.get(path, ("/tokenize", {"prompt": "Hi"}, ""))
    for field in ("kvlite", "unknown"):
        body = json.dumps(good)[:-1] + f', "{field}": {{"within": {value}}}}}'
        error = require_error(server.http.post(address, content=body), 400, UNSAYABLE[value])
        assert error["param"] == field and error["message"].startswith(f"{field}.within")


def test_half_a_character_in_a_text_is_replaced(server: Server) -> None:
    for written, meant in (("a\\ud800", "a\ufffd"), ("\\ud83d\\ude00", "\U0001f600")):
        body = f'{{"prompt": "{written}"}}'
        tokens = server.http.post("/tokenize", content=body).json()["tokens"]
        assert tokens == server.http.post("/tokenize", json={"prompt": meant}).json()["tokens"]
    half = "a\ud800b"
    for address, good in (
        ("/v1/completions", {"prompt": half}),
        ("/v1/responses", {"input": half, "instructions": half}),
        ("/v1/chat/completions", {"messages": said(half)}),
    ):
        answer = server.http.post(
            address, content=json.dumps({**good, "max_tokens": 1} if "input" not in good else good)
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("address", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": said("a") * 600_000}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": said("a"), "logit_bias": {str(each): 1 for each in range(900_000)}},
            "logit_bias",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 300_000}, "input"),
        ("/detokenize", {"tokens": [1] * 1_100_000}, "tokens"),
    ],
)
def test_counts_are_capped_and_nobody_waits(
    server: Server, address: str, body: Any, field: str
) -> None:
    content, over, waits = json.dumps(body).encode(), threading.Event(), [0.0]

    def look() -> None:
        with server.http as http:
            while not over.is_set():
                begun = time.monotonic()
                assert http.get("/health").status_code == 200
                waits.append(time.monotonic() - begun)
                time.sleep(0.01)

    looking = threading.Thread(target=look)
    looking.start()
    answer = server.http.post(address, content=content)
    over.set()
    looking.join()
    error = require_error(answer, 400, "at most")
    assert error["param"] == field
    assert sorted(waits)[-1] < 1  # beside the client, which has the same lock


@pytest.mark.parametrize("path", ["responses"])
def test_a_bomb_is_refused_and_holds_up_nobody(server: Server, path: str) -> None:
    address, good, _ = DIALECTS[path]
    named = {name: {"type": "string"} for name in NAMES}
    bomb = {"type": "object", "title": path, "properties": named}
    given = {"text": {"format": {"type": "json_schema", "schema": bomb}}}
    body = good | (given if path == "responses" else {"guided_json": bomb})
    done = list[Any]()
    began = time.monotonic()
    thread = threading.Thread(target=lambda: done.append(server.http.post(address, json=body)))
    thread.start()
    assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success
    assert not done
    thread.join()
    require_error(done[0], 400, "takes more than")
    assert time.monotonic() - began < 10
    again = time.monotonic()
    require_error(server.http.post(address, json=body), 400, "takes more than")
    assert time.monotonic() - again < 1


@pytest.mark.parametrize("path", DIALECTS)
def test_no_tokens_is_an_answer(server: Server, path: str) -> None:
    address, good, length = DIALECTS[path]
    answer = server.http.post(address, json={**good, length: 0})
    assert answer.status_code == 200, answer.text
    plain = answer.json()
    if path == "responses":
        assert plain["status"] == "incomplete"
        assert plain["output"][0]["content"][0]["text"] == ""
        assert plain["usage"]["output_tokens"] == 0 < plain["usage"]["input_tokens"]
    else:
        (choice,) = plain["choices"]
        assert choice["finish_reason"] == "length"
        assert (choice.get("text") or choice.get("message", {}).get("content") or "") == ""
        assert plain["usage"]["completion_tokens"] == 0 < plain["usage"]["prompt_tokens"]
    streamed = server.http.post(address, json={**good, length: 0, "stream": True})
    assert streamed.status_code == 200 and '"error": {' not in streamed.text
    assert "length" in streamed.text or "incomplete" in streamed.text


def test_slow_bodies_are_cut_and_take_no_place(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "PATIENCE", 2.0)
    with serving(settings, ServerConfig(folder=tmp_path, requests=2)) as server:
        host, port = server.address.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(4)]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 999\r\n\r\n{{"
        for each in slow:
            each.sendall(head.encode())
        time.sleep(0.3)
        body = {"prompt": "Hi", "max_tokens": 1}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        for _ in range(8):
            time.sleep(0.3)
            for each in slow:
                try:
                    each.sendall(b" ")
                except OSError:
                    continue
        for each in slow:
            each.settimeout(10)
            assert b" 408 " in each.recv(4096).partition(b"\r\n")[0]
            each.close()


@pytest.mark.parametrize(
    ("path", "field"), [("chat", "thinking_budget"), ("responses", "reasoning_budget")]
)
def test_a_setting_out_of_range_ends_no_other_answer(server: Server, path: str, field: str) -> None:
    address, good, length = DIALECTS[path]
    others = list[Any]()
    body = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True}
    beside = threading.Thread(
        target=lambda: others.append(server.http.post("/v1/completions", json=body))
    )
    beside.start()
    while not server.model.answering.going and not others:
        time.sleep(0.01)
    for value in (2**64, 10**299):
        error = require_error(
            server.http.post(address, json={**good, length: 2, field: value}), 400, "out of range"
        )
        assert error["param"] == "reasoning_budget" and "--" not in error["message"]
    beside.join()
    assert others[0].status_code == 200, others[0].text


def test_damaged_files_of_a_server_are_named_once_and_it_starts(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(folder=tmp_path)
    with serving(settings, config) as server:
        library = server.model.state.library
    files = tmp_path / "server" / "files"
    files.mkdir(parents=True, exist_ok=True)
    deep, names = b"[" * 100_000, list[str]()
    for content in (b"", deep, b"KVLITE", b"x"):
        record = library.new()
        library.save(record)
        library.whole(record.id).write_bytes(content)
        names.append(record.id)
    gone = library.new()
    library.save(gone)
    library.whole(gone.id).symlink_to(tmp_path / "nowhere")
    for at, content in enumerate((b"", deep, b"[]", b'{"about": 1}', b"\xff")):
        names.append(f"file-{at:032x}.json")
        (files / names[-1]).write_bytes(content)
    caplog.set_level("WARNING", "kvlite.server")
    with serving(settings, config) as server:
        for _ in range(2):
            assert server.http.get("/v1/files").json()["data"] == []
            body = {"messages": said("Hi"), "max_tokens": 1}
            assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    for name in names:
        told = [each.getMessage() for each in caplog.records if name in each.getMessage()]
        assert len(told) == 1 and "\n" not in told[0], (name, told)


def test_a_read_only_disk_keeps_no_upload(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **given: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("kvlite.server.files.shutil.copyfileobj", fails)
    monkeypatch.setattr(Path, "unlink", fails)
    answer = server.http.post("/v1/files", files={"file": ("a.txt", b"Rails are shy.")})
    require_error(answer, 507, "Read-only file system")


def test_lines_of_a_batch_are_read_likewise(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for value, words in UNSAYABLE.items():
        path.write_text(f'{{"id": "1", "other": {value}}}\n')
        with pytest.raises(SettingError, match=words):
            list(json_rows(str(path)))
    with pytest.raises(SettingError, match="max_tokens 0"):
        row = {"custom_id": "1", "body": {"messages": said("Hi"), "max_tokens": 0}}
        tasks_of_requests([("line 1", row)], Settings())


def test_a_bomb_in_a_tool_is_not_enforced_and_refused_where_it_must_be() -> None:
    bomb = {"type": "integer", "multipleOf": 9_999_991}
    parameters = {"type": "object", "properties": {"a": bomb}}
    assert followed(Tool("a", "", parameters, False)) == {"type": "object"}
    with pytest.raises(SettingError, match=r"tool 'a'.*takes more than"):
        followed(Tool("a", "", parameters, True))
