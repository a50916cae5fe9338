"""Requests that come while a model is loaded wait for it."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvlite.config.settings import Settings
from kvlite.conversation.runner import open_runner
from kvlite.errors import ModelError
from kvlite.server.config import ServerConfig
from tests.server.conftest import Server, said, serving
from tests.server.test_refusing import CHAT, require_error

BODY = {"messages": said("Hi"), "max_tokens": 1}


@dataclass
class Slow:
    """A server whose model is loaded once `may` is set, or cannot be."""

    server: Server
    may: threading.Event
    fails: list[Exception] = field(default_factory=list)
    looks: list[float] = field(default_factory=list)

    def until_one_waits(self) -> None:
        seen = len(self.looks)
        until = time.monotonic() + 60
        while len(self.looks) < seen + 3:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.fixture
def slow(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    may, fails = threading.Event(), list[Exception]()

    def opened(*args: Any, **given: Any) -> Any:
        assert may.wait(120)
        for each in fails:
            raise each
        return open_runner(*args, **given)

    monkeypatch.setattr("kvlite.server.served_model.open_runner", opened)
    with serving(settings, ServerConfig(folder=tmp_path), loaded=False) as server:
        made = Slow(server, may, fails)
        kind = type(server.model)
        is_awaited = vars(kind)["is_awaited"].fget

        def looked(self: Any) -> bool:
            made.looks.append(time.monotonic())
            return bool(is_awaited(self))

        monkeypatch.setattr(kind, "is_awaited", property(looked))
        try:
            yield made
        finally:
            may.set()


@contextmanager
def asking(server: Server, body: dict[str, Any] = BODY) -> Iterator[Future[httpx.Response]]:
    with ThreadPoolExecutor() as clients:
        yield clients.submit(server.http.post, CHAT, json=body)


def test_a_request_waits_for_a_model_that_is_being_loaded(slow: Slow) -> None:
    with asking(slow.server) as first, asking(slow.server, BODY | {"stream": True}) as second:
        slow.until_one_waits()
        began = time.monotonic()
        require_error(slow.server.http.get("/health"), 503, "being loaded")
        listed = slow.server.http.get("/v1/models").json()["data"][0]
        assert listed["meta"] == {"loading": True} and time.monotonic() - began < 5
        assert not first.done() and not second.done()
        slow.may.set()
        assert first.result(60).json()["choices"][0]["message"]["role"] == "assistant"
        assert second.result(60).text.endswith("data: [DONE]\n\n")


def test_a_loading_that_fails_is_told_at_once(slow: Slow) -> None:
    with asking(slow.server) as answer:
        slow.until_one_waits()
        slow.fails.append(ModelError("the file is cut"))
        slow.may.set()
        require_error(answer.result(20), 500, "the model cannot be used: the file is cut")


def test_one_that_takes_longer_is_asked_for_again(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.server.models._LOADING", 0.2)
    answer = slow.server.http.post(CHAT, json=BODY)
    assert require_error(answer, 503, "being loaded")["code"] == "loading"
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("ends", ["client", "server"])
def test_whoever_leaves_waits_no_more(slow: Slow, ends: str) -> None:
    if ends == "client":
        with pytest.raises(httpx.ReadTimeout):
            slow.server.http.post(CHAT, json=BODY, timeout=1)
        assert until(lambda: time.monotonic() - slow.looks[-1] > 0.5)
    else:
        with asking(slow.server) as answer:
            slow.until_one_waits()
            slow.server.end()
            require_error(answer.result(20), 503, "the server ends")
            slow.may.set()


def until(is_so: Callable[[], bool]) -> bool:
    limit = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)
    return True
