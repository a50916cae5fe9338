"""A server in a process of its own: what it takes, logs and answers, and how it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.cli.test_serve import free_port

# Seconds for what must come, on a machine that does other things.
PATIENCE = 240
# Options of one that is attacked: answers to nonsense are short, and keep little.
ATTACKED = ("--keep", "64MiB", "--max-tokens", "8")


@dataclass
class Served:
    """A running server.

    Attributes:
        port: of 127.0.0.1.
        folder: its own in the data folder, for what it keeps.
        log: what it writes to standard error.
    """

    port: int
    data: Path
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def http(self) -> httpx.Client:
        """A client that waits long."""
        return httpx.Client(base_url=self.address, timeout=PATIENCE)

    @property
    def folder(self) -> Path:
        """Where the server keeps conversations."""
        return self.data / "server" / str(self.port)

    def memory(self) -> int:
        """Bytes of memory that it and its children hold."""
        found = 0
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            for each in [own, *own.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    found += each.memory_info().rss
        return found

    def flaws(self) -> list[str]:
        """Tracebacks in its log, each once, and whether it has ended."""
        text = self.log.read_text(errors="replace")
        parts = text.split("Traceback (most recent call last):")[1:]
        found = list(dict.fromkeys("Traceback" + each[-1500:] for each in parts))
        code = self.process.poll()
        if code not in (None, -signal.SIGKILL):
            found.append(f"the server ended with {code}: {text[-1500:]}")
        return found

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)


@contextmanager
def served(
    model: Path, data: Path, *options: str, port: int = 0, threads: int = 1
) -> Iterator[Served]:
    """A server of `kvlite serve` that is loaded. The log of a data folder goes on."""
    port, log = port or free_port(), data.parent / f"{data.name}.log"
    command = [sys.executable, "-m", "kvlite", "serve", str(model), "--port", str(port)]
    command += ["--method", "full", *options]
    given = os.environ | {
        "KVLITE_DATA": str(data),
        "KVLITE_CONFIG": str(data.parent / "config"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    data.mkdir(exist_ok=True)
    with (
        log.open("ab") as told,
        subprocess.Popen(command, env=given, stderr=told, stdout=told) as process,
    ):
        found = Served(port, data, log, process)
        try:
            until(lambda: process.poll() is not None or _is_up(found))
            if process.poll() is not None:
                raise RuntimeError(f"no server: {log.read_text()[-2000:]}")
            yield found
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait until something holds, so long at most; whether it does."""
    limit = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def chat(http: httpx.Client, messages: list[Any], most: int = 8) -> httpx.Response:
    """A request whose answer is always the same."""
    body = {"messages": messages, "max_tokens": most, "temperature": 0}
    return http.post("/v1/chat/completions", json=body)


def said_in(answer: httpx.Response) -> str:
    """The text of its answer."""
    return str(answer.json()["choices"][0]["message"]["content"])


def _is_up(server: Served) -> bool:
    try:
        with server.http as http:
            return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
