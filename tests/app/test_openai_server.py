"""Programs use the page's model by OpenAI's API, between its own answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvlite.server.config import ServerConfig
from kvlite_app.engine.service import Service
from kvlite_app.openai_server import OpenAIServer
from tests.app.conftest import client, serving, waited
from tests.app.test_service import blocked
from tests.cli.test_serve import free_port
from tests.server.conftest import said
from tests.server.test_chat import expected, reference

__all__ = ["reference"]
A, CHAT = "a" * 32, "/chat/completions"
HERONS = "Herons stand in the water. " * 20


@pytest.fixture
def http(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A program that asks the page's model."""
    monkeypatch.setattr("kvlite.server.kept.SHORT", 100)
    server = OpenAIServer(ServerConfig(port=free_port(), folder=tmp_path / "server"))
    loading = service.load(service.model_host.settings)
    with (
        server.answering(service, loading),
        httpx.Client(base_url=server.address, timeout=60) as http,
    ):
        loading.wait()
        waited(partial(is_loaded, http))
        yield http


def models(http: httpx.Client, address: str = "") -> list[tuple[str, str]]:
    data = http.get(f"{address}/models").json()["data"]
    return [(each["id"], each["status"]["value"]) for each in data]


def is_loaded(http: httpx.Client, address: str = "") -> bool:
    return models(http, address)[0][1] == "loaded"


def asked(http: httpx.Client, *texts: str) -> dict[str, Any]:
    """The answer to a chat, and what was read for it."""
    made = http.post(CHAT, json={"messages": said(*texts), "max_tokens": 4})
    assert made.status_code == 200, made.text
    plain = made.json()
    return {
        "text": plain["choices"][0]["message"]["content"],
        "read": plain["usage"]["kvlite"]["prompt_tokens"],
    }


def last(service: Service) -> str:
    return service.store("").record(A).said[-1].text


def test_page_and_programs_take_turns(service: Service, http: httpx.Client, reference: Any) -> None:
    service.say("", A, "What is a heron?").wait()
    assert last(service) == expected(reference, said("What is a heron?"), 4)
    go = blocked(service)
    with ThreadPoolExecutor() as programs:
        waits = programs.submit(asked, http, HERONS)
        waited(lambda: service.engine.is_wanted)
        page = service.say("", A, "And a stork?")
        go.set()
        assert waits.result(60)["text"] == expected(reference, said(HERONS), 4)
    page.wait()
    before = said(
        "What is a heron?", expected(reference, said("What is a heron?"), 4), "And a stork?"
    )
    assert last(service) == expected(reference, before, 4)
    assert asked(http, HERONS, "Yes.", "Where?")["read"] < 80
    assert service.model_host.active is not None


@pytest.mark.long
def test_where_one_conversation_fits_each_makes_way_for_the_other(
    service: Service, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both do, both stay."""
    host, fits = service.model_host, True

    def of_programs() -> list[bool]:
        assert host.lent is not None and host.lent.current.conversations is not None
        return [each.talk is not None for each in host.lent.current.conversations.kept]

    def free(devices: Any) -> int:
        return 100 * (fits or host.active is None or True not in of_programs())

    monkeypatch.setattr("kvlite.conversation.turn.wanted_bytes", lambda turn: 100)
    monkeypatch.setattr("kvlite.server.conversations.spare_bytes", free)
    service.say("", A, HERONS).wait()
    asked(http, HERONS)
    assert host.active is not None and of_programs() == [True]
    fits = False
    service.say("", A, "Who?").wait()
    assert host.active is not None and of_programs() == [False]
    asked(http, HERONS, "Yes.", "Where?")
    assert host.active is None and of_programs() == [True]
    service.say("", A, "Where?").wait()
    assert host.active is not None and of_programs() == [False]
    assert host.active.session.last is not None
    assert host.active.session.last.prompt_tokens < 80
    assert asked(http, HERONS, "Yes.", "Where?", "There.", "When?")["read"] < 80
    assert host.active is None


@pytest.mark.long
def test_one_process_answers_people_and_programs(
    tmp_path: Path, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_API_KEY", "secret")
    port = free_port()
    args = ("--model", str(talker), "--max-tokens", "4", "--api-port", str(port))
    with serving(tmp_path, *args) as server:
        address = f"http://127.0.0.1:{port}/v1"
        assert httpx.get(f"{address}/models").status_code == 401
        with httpx.Client(headers={"Authorization": "Bearer secret"}, timeout=60) as http:
            waited(partial(is_loaded, http, address))
            made = http.post(f"{address}{CHAT}", json={"messages": said("Hi"), "max_tokens": 3})
            assert made.json()["usage"]["completion_tokens"] == 3
        assert client(server).predict("What is a heron?", "", api_name="/say")
        assert server.end() == 0
