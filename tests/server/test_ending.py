"""Requests that are open: what they are told when the server ends, and how many there may be."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvlite.config.settings import Settings
from kvlite.server import answering, conversations, serve, served_model
from kvlite.server.config import ServerConfig
from tests.server.conftest import Server, said, serving
from tests.server.test_refusing import require_error, tuple_of

CHAT, LONG = "/v1/chat/completions", {"messages": said("Hi"), "max_tokens": 600}
STREAMED = {**LONG, "stream": True}


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that take half a minute, one at a time."""
    monkeypatch.setattr(answering, "MOST", 1)
    answer = conversations.answer_prompt

    def slowly(*args: Any, **given: Any) -> Iterator[Any]:
        for piece in answer(*args, **{**given, "ignore_eos": True}):
            time.sleep(0.05)
            yield piece

    monkeypatch.setattr(conversations, "answer_prompt", slowly)


def until(server: Server, waiting: int, generated: int = 1) -> None:
    """Wait until so many requests are open, and the first one is being answered."""
    limit = time.monotonic() + 120
    counters = server.state.counters
    while counters.waiting < waiting or counters.generated < generated:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_open_requests_are_told_that_the_server_ends(
    settings: Settings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_model, "FIRST_BEAT", 60.0)  # who waits has received nothing
    asked = dict[str, Future[httpx.Response]]()
    with ThreadPoolExecutor() as clients:
        with serving(settings, ServerConfig(folder=tmp_path)) as server:

            def ask(path: str, body: dict[str, Any]) -> Future[httpx.Response]:
                return clients.submit(server.http.post, path, json=body)

            asked["streamed"] = ask(CHAT, STREAMED)
            until(server, 1)
            asked["whole"], asked["waiting"] = ask(CHAT, LONG), ask(CHAT, STREAMED)
            asked["text"] = ask("/v1/completions", {"prompt": "Hi", "max_tokens": 600})
            asked["response"] = ask("/v1/responses", {"input": "Hi", "max_output_tokens": 600})
            until(server, 5)
            begun = time.monotonic()
        assert time.monotonic() - begun < 20
        answers = {name: each.result(60) for name, each in asked.items()}
    streamed = answers.pop("streamed")
    assert streamed.status_code == 200
    *chunks, error, done, _ = streamed.text.split("\n\n")
    assert len(chunks) >= 2 and done == "data: [DONE]"
    told = json.loads(error.removeprefix("data: "))["error"]
    assert told["message"].startswith("the server ends") and told["type"] == "server_error"
    for answer in answers.values():
        assert require_error(answer, 503, "the server ends")["type"] == "server_error"
        assert answer.headers["retry-after"]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert not server.state.engine._thread.is_alive()
    assert server.state.counters.generated < 100 and not server.state.counters.waiting


def test_clients_that_send_no_more_or_read_nothing_do_not_hold_it(
    settings: Settings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_PATIENCE", 0.2)
    scores = {"prompt": [5] * 1000, "echo": True, "logprobs": 20, "n": 16}  # 10 MB
    body = json.dumps({**scores, "stream": True}).encode()
    head = f"HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        serving(settings, ServerConfig(folder=tmp_path)) as server,
        socket.create_connection(tuple_of(server.address)) as sending,
        socket.create_connection(tuple_of(server.address)) as deaf,
    ):
        sending.sendall(f"POST {CHAT} {head}".encode())
        deaf.sendall(f"POST /v1/completions {head}".encode() + body)
        until(server, 1)
        server.end()
        assert b"503" in sending.recv(1000).split(b"\r\n")[0]
        server.until_ended(60)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_the_newer_way_is_told_in_an_event_of_its_own(settings: Settings, tmp_path: Path) -> None:
    asked = {"input": "Hi", "max_output_tokens": 600, "stream": True}
    with (
        ThreadPoolExecutor() as clients,
        serving(settings, ServerConfig(folder=tmp_path)) as server,
    ):
        answer = clients.submit(server.http.post, "/v1/responses", json=asked)
        until(server, 1, generated=3)
        server.end()
        *_, event, _ = answer.result(60).text.split("\n\n")
    name, _, data = event.partition("\ndata: ")
    told = json.loads(data)
    assert name == "event: response.failed" and told["type"] == "response.failed"
    failed = told["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_ends"
    assert failed["error"]["message"].startswith("the server ends")


def test_one_request_too_many_must_wait(settings: Settings, tmp_path: Path) -> None:
    """Those that are answered count, and many more whose bodies have not come whole."""
    with serving(settings, ServerConfig(folder=tmp_path, requests=1)) as server:

        def until_status(wanted: int) -> None:
            limit = time.monotonic() + 15
            while server.http.post(CHAT, json={}).status_code != wanted:
                assert time.monotonic() < limit
                time.sleep(0.02)

        with server.http.stream("POST", CHAT, json=STREAMED) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            assert server.http.post(CHAT, json={}).status_code == 429
        until_status(400)
        with ExitStack() as sending:
            for _ in range(16):
                assert server.http.post(CHAT, json={}).status_code in (400, 429)
                client = sending.enter_context(socket.create_connection(tuple_of(server.address)))
                client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode())
                client.sendall(b"Content-Length: 9\r\n\r\n{")
            until_status(429)
        until_status(400)
