"""A server as programs find it: by HTTP, with OpenAI's client."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from kvlite.server.models import Models
from kvlite.server.serve import HttpServer
from kvlite.server.served_model import ServedModel
from kvlite.server.state import ServerState


@dataclass
class Server:
    """A running server."""

    address: str
    models: Models
    http_server: HttpServer
    thread: threading.Thread

    @property
    def model(self) -> ServedModel:
        """The one it was started with."""
        return self.models.first

    @property
    def state(self) -> ServerState:
        return self.models.state

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="any", max_retries=0)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=60)

    def end(self) -> None:
        """As Ctrl-C does."""
        self.http_server.should_exit = True

    def until_ended(self, seconds: float) -> None:
        """Wait until the server's thread has."""
        self.thread.join(seconds)
        assert not self.thread.is_alive()

    def until_idle(self) -> None:
        """Wait until nothing is done or waits."""
        until = time.monotonic() + 120
        while self.state.engine.current is not None or self.state.counters.waiting:
            assert time.monotonic() < until
            time.sleep(0.01)


@contextmanager
def serving(settings: Settings, config: ServerConfig, *, loaded: bool = True) -> Iterator[Server]:
    """A server in this process, on any free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        models = Models(settings, ServerState(config))
        loading = models.first.load()
        if loaded:
            loading.wait()
        server = HttpServer(models)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        found = Server(f"http://127.0.0.1:{port}", models, server, thread)
        try:
            yield found
        finally:
            found.end()
            found.until_ended(120)


def with_template(model: Path, folder: Path, template: str) -> Path:
    """A copy of a model, in `folder` and by its name, with another chat template."""
    made = folder / folder.name.rstrip("0123456789")
    shutil.copytree(model, made)
    (made / "chat_template.jinja").write_text(template)
    return made


@pytest.fixture(scope="session")
def settings(tiny_folder: Path) -> Settings:
    return Settings(model=str(tiny_folder), max_new_tokens=8)


@pytest.fixture(scope="session")
def server(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On a tiny random model of 1,024 tokens with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("server")
    with serving(settings, ServerConfig(folder=folder)) as found:
        yield found


def said(*texts: str) -> list[Any]:
    """Messages of a user and an assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
