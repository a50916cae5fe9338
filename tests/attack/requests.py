"""Bad requests to a server, and good ones among them."""

import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.attack.health import Health, watched
from tests.attack.inputs import MOST, Sent, sent_of
from tests.attack.process import Served, chat, said_in, until
from tests.server.conftest import said

# At once.
CLIENTS = 4
# Memory that may stay: the allocator keeps what it had, and answers leave conversations behind.
SHARE, BYTES = 0.15, 100 << 20
# What is asked with an answer that is known.
ASKED = ("Hi", "Where do herons stand?", "Count to ten. " * 40, "1 2 3 4", "é\U0001f600")


class Attack:
    """What is sent to a server, and what was found wrong.

    Attributes:
        good: texts of answers that were compared.
        sent: when each request began and ended, and what it was.
    """

    def __init__(self, server: Served, seed: int) -> None:
        self.server, self.seed = server, seed
        self.found = list[str]()
        self.statuses = Counter[int | str]()
        self.good = 0
        self.sent = list[tuple[float, float, str]]()
        self.known = dict[str, str]()

    def __str__(self) -> str:
        shown = ", ".join(f"{key}: {each}" for key, each in sorted(self.statuses.items(), key=str))
        return f"{len(self.sent)} requests ({shown}), {self.good} good ones among them"

    def warm_up(self) -> None:
        """Ask what is known later, and the first of each kind, which loads what that needs."""
        with self.server.http as http:
            for each in ASKED * 2:
                self.known[each] = said_in(chat(http, said(each)))
            http.post("/v1/completions", json={"prompt": "a" * (4 << 20)})
            guided = {"prompt": "a", "max_tokens": 2, "guided_json": {"type": "object"}}
            http.post("/v1/completions", json=guided)
        self.run(iter(range(2_000_000, 2_000_100)))

    def run(self, numbers: Iterator[int], *, clients: int = CLIENTS, every: int = 100) -> None:
        """Send those, by several clients; after each `every` a good one."""
        lock = threading.Lock()

        def client() -> None:
            with self.server.http as http:
                while True:
                    with lock:
                        number = next(numbers, None)
                    if number is None:
                        return
                    self._send(http, number)
                    if number % every == every - 1:
                        self.require_well(number)
                    if number % 500 == 499:
                        print(f"{len(self.sent)} sent", flush=True)

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def require_well(self, number: int) -> None:
        """Ask what has a known answer."""
        asked = ASKED[number % len(ASKED)]
        began = time.monotonic()
        with self.server.http as http:
            try:
                answer = chat(http, said(asked))
            except httpx.HTTPError as error:
                self.found.append(f"after {number}: a good request: {type(error).__name__} {error}")
                return
        took = time.monotonic() - began
        self.good += 1
        if answer.status_code == 503 and took <= MOST:
            self.statuses["good, 503"] += 1
        elif answer.status_code != 200 or took > MOST or said_in(answer) != self.known[asked]:
            self.found.append(
                f"after {number}: a good request {asked[:20]!r}: {answer.status_code} after "
                f"{took:.1f} s {answer.text[:300]}, not {self.known[asked]!r}"
            )

    def require_memory(self, before: int) -> int:
        """Wait until memory is back; what it is then."""
        most = before + max(int(SHARE * before), BYTES)
        if not until(lambda: self.server.memory() <= most, 30):
            now = self.server.memory() >> 20
            self.found.append(f"memory was {before >> 20} MiB and stays at {now} MiB")
        return self.server.memory()

    def require_quick(self, health: Health) -> None:
        """Name the looks that took too long, and what was open then."""
        for each in health.slow()[:10]:
            end = each.began + each.took
            beside = [
                what for began, ended, what in self.sent if began < end and ended > each.began
            ]
            self.found.append(f"/health took {1000 * each.took:.0f} ms beside {beside}")
        for look in health.failed()[:3]:
            self.found.append(f"/health said {look.status}")

    def _send(self, http: httpx.Client, number: int) -> None:
        sent = sent_of(random.Random(f"{self.seed} {number}"))
        began = time.monotonic()
        if sent.leaves is None:
            self._ask(http, number, sent)
        else:
            self._leave(sent)
        what = f"{number}: {sent.method} {sent.path} of {len(sent.body):,} bytes"
        self.sent.append((began, time.monotonic(), what))

    def _ask(self, http: httpx.Client, number: int, sent: Sent) -> None:
        began = time.monotonic()
        try:
            answer = http.request(
                sent.method,
                sent.path,
                content=sent.body,
                headers=sent.headers,
                timeout=max(60, sent.patience),
            )
        except httpx.HTTPError as error:
            self._tell(number, sent, f"no answer: {type(error).__name__} {error}")
            return
        took = time.monotonic() - began
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code not in (503, 507):
            self._tell(number, sent, f"{answer.status_code} {answer.text[:200]}")
        elif "went wrong" in answer.text or "Traceback" in answer.text:
            self._tell(number, sent, answer.text[-300:])
        if took > sent.patience:
            self._tell(number, sent, f"{answer.status_code} after {took:.1f} s")

    def _leave(self, sent: Sent) -> None:
        """Send a part of it, or all, and go."""
        self.statuses["left"] += 1
        head = f"{sent.method} {sent.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += f"Content-Length: {len(sent.body)}\r\n\r\n"
        assert sent.leaves is not None
        address = "127.0.0.1", self.server.port
        with suppress(OSError), socket.create_connection(address, 10) as client:
            whole = head.encode() + sent.body
            client.sendall(whole[: int(len(whole) * sent.leaves)])
            time.sleep(0.02)

    def _tell(self, number: int, sent: Sent, said: str) -> None:
        shown = f"{sent.method} {sent.path} of {len(sent.body):,} bytes {sent.body[:300]!r}"
        self.found.append(f"seed {self.seed} number {number}: {said}\n    {shown}")
        print(self.found[-1], flush=True)


def idle(server: Served, folder: Path) -> Health:
    """What `/health` does while nothing else is asked."""
    with watched(server.port, folder) as health:
        time.sleep(5)
    return health


def attack(server: Served, seed: int, count: int, folder: Path) -> list[str]:
    """What is wrong with the answers to so many requests."""
    made = Attack(server, seed)
    made.warm_up()
    print(f"idle: {idle(server, folder)}", flush=True)
    with watched(server.port, folder) as health, memory_of(server, 0.2) as curve:
        made.run(iter(range(count)))
    made.require_well(count)
    after = made.require_memory(curve[0])
    made.require_quick(health)
    print(f"{made}\n{health}")
    print(f"MiB: {curve[0] >> 20} before, {max(curve) >> 20} at most, {after >> 20} after")
    return [*made.found, *server.flaws()]


@contextmanager
def memory_of(server: Served, every: float) -> Iterator[list[int]]:
    """The bytes that it holds at the beginning, and after each so many seconds meanwhile."""
    began, curve, over = time.monotonic(), [server.memory()], threading.Event()

    def look() -> None:
        while not over.wait(max(0.0, began + every * len(curve) - time.monotonic())):
            curve.append(server.memory())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield curve
    finally:
        over.set()
        looking.join()


def soak(server: Served, seed: int, minutes: float, folder: Path) -> list[str]:
    """What is wrong after so many minutes of six clients, with a good request in three."""
    made = Attack(server, seed)
    made.warm_up()
    print(f"idle: {idle(server, folder)}", flush=True)
    ends = time.monotonic() + 60 * minutes
    until_end = itertools.takewhile(lambda _: time.monotonic() < ends, itertools.count(1_000_000))
    with watched(server.port, folder) as health, memory_of(server, 30) as curve:
        made.run(iter(until_end), clients=6, every=2)
    made.require_well(0)
    made.require_quick(health)
    print(f"{made}\n{health}")
    print("MiB each 30 s: " + " ".join(str(each >> 20) for each in curve))
    flat, last = curve[4:8], curve[-4:]
    if flat and sum(last) / len(last) > (first := sum(flat) / len(flat)) + max(
        SHARE * first, BYTES
    ):
        made.found.append("memory goes on growing after two minutes")
    return [*made.found, *server.flaws()]
