"""A generated attack on a running server: `python -m tests.attack [SEED] [COUNT]`.

The same seed sends the same requests. Nothing may be answered with 5xx but 503 and 507, or in more
than ten seconds, or leave a traceback in the log; and at the end all is as at the beginning.
"""

import json
import logging
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from tests.attack.inputs import Sent, sent_of
from tests.attack.model import tiny_model
from tests.server.conftest import Server, serving

# Seconds in which everything is answered, and clients at once.
MOST, CLIENTS = 10.0, 4


class Attack:
    """What is sent, and what was found wrong."""

    def __init__(self, server: Server, seed: int, count: int) -> None:
        self.server, self.seed, self.count = server, seed, count
        self.found = list[str]()
        self.statuses = Counter[int | str]()
        self._numbers, self._lock = iter(range(count)), threading.Lock()

    def run(self) -> None:
        """Send all of it, by several clients."""
        clients = [threading.Thread(target=self._client) for _ in range(CLIENTS)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        self.server.until_idle()
        self._require_well("at the end")

    def _client(self) -> None:
        with self.server.http as http:
            while True:
                with self._lock:
                    number = next(self._numbers, None)
                if number is None:
                    return
                sent = sent_of(random.Random(f"{self.seed} {number}"))
                if sent.leaves is None:
                    self._ask(http, number, sent)
                else:
                    self._leave(sent)
                if number % 100 == 99:
                    self._require_well(f"after {number}")

    def _ask(self, http: httpx.Client, number: int, sent: Sent) -> None:
        began = time.monotonic()
        try:
            answer = http.request(sent.method, sent.path, content=sent.body, headers=sent.headers)
        except httpx.HTTPError as error:
            self._tell(number, sent, f"no answer: {type(error).__name__} {error}")
            return
        took = time.monotonic() - began
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code not in (503, 507):
            self._tell(number, sent, f"{answer.status_code} {answer.text[:200]}")
        elif "went wrong" in answer.text or "Traceback" in answer.text:
            self._tell(number, sent, answer.text[-300:])
        if took > MOST:
            self._tell(number, sent, f"answered after {took:.1f} s")

    def _leave(self, sent: Sent) -> None:
        """Send a part of it, or all, and go."""
        self.statuses["left"] += 1
        host, port = self.server.address.removeprefix("http://").split(":")
        head = f"{sent.method} {sent.path} HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Length: {len(sent.body)}\r\n\r\n"
        assert sent.leaves is not None
        with socket.create_connection((host, int(port))) as client, suppress(OSError):
            whole = head.encode() + sent.body
            client.sendall(whole[: int(len(whole) * sent.leaves)])
            time.sleep(0.02)

    def _require_well(self, when: str) -> None:
        with self.server.http as http:
            began = time.monotonic()
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            answer = http.post("/v1/chat/completions", json=body)
            took = time.monotonic() - began
        if answer.status_code not in (200, 503) or took > MOST:
            self.found.append(f"{when}: a good request: {answer.status_code} after {took:.1f} s")

    def _tell(self, number: int, sent: Sent, said: str) -> None:
        shown = f"{sent.method} {sent.path} {sent.body[:300]!r}"
        self.found.append(f"seed {self.seed} number {number}: {said}\n    {shown}")


@contextmanager
def logged() -> Iterator[list[str]]:
    """Tracebacks that are logged meanwhile."""
    kept = list[str]()

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info or record.levelno >= logging.ERROR:
                kept.append(logging.Formatter().format(record)[-1500:])

    handler = Keeps()
    logging.getLogger().addHandler(handler)
    yield kept
    logging.getLogger().removeHandler(handler)


def attack(seed: int, count: int) -> list[str]:
    """What is wrong with the answers to so many requests."""
    with tempfile.TemporaryDirectory() as folder, logged() as told:
        settings = Settings(model=str(tiny_model(Path(folder) / "tiny")), max_new_tokens=8)
        with serving(settings, ServerConfig(folder=Path(folder) / "server")) as server:
            made = Attack(server, seed, count)
            made.run()
        shown = {str(key): each for key, each in made.statuses.items()}
        print(f"{count} requests: {json.dumps(shown)}")
        return [*made.found, *dict.fromkeys(told)]


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    wrong = attack(given[0] if given else 0, given[1] if len(given) > 1 else 3000)
    print("\n".join(wrong[:40]) or "nothing is wrong")
    sys.exit(bool(wrong))
