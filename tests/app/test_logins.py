"""Wrong passwords, and logging out."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

import pytest
from starlette.middleware import Middleware

from kvlite_app.web.logins import Attempts, Logins, TooManyWaiting, address_of
from kvlite_app.web.routes import Routes
from tests.app.conftest import awaited
from tests.app.small_app import SmallApp, logged_in, visitor

RIGHT = {"username": "ann", "password": "secret"}


class Clock:
    """Time that passes while someone waits.

    Attributes:
        now: in seconds.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def attempts(clock: Clock) -> Attempts:
    return Attempts(clock, clock.sleep)


def test_wrong_passwords_take_longer_and_longer(clock: Clock, attempts: Attempts) -> None:
    web, took = visitor(Middleware(Logins, attempts=attempts)), []
    for number in range(60):
        before = clock.now
        wrong = {"username": f"user {number}", "password": "guess"}
        assert web.post("/login", data=wrong).status_code == 400
        took.append(clock.now - before)
    assert took[:6] == [0, 0, 0, 0.5, 1, 2]
    assert max(took) == 30
    assert sum(took) > 1500
    before = clock.now
    assert web.post("/login", data=RIGHT).status_code == 200  # late, but not locked out
    assert clock.now - before == 30
    clock.now += 1000
    assert attempts.seconds("testclient", "ann") == 0


def test_a_name_that_many_try_costs_its_owner_seconds(attempts: Attempts) -> None:
    for number in range(1000):
        attempts.missed(f"10.0.{number // 250}.{number % 250}", "ann")
    assert attempts.seconds("192.168.1.1", "ann") == 5
    assert attempts.seconds("192.168.1.1", "ben") == 0


def test_who_tries_many_at_once_waits_in_a_line_that_is_short() -> None:
    go = asyncio.Event()

    async def sleep(_: float) -> None:
        await go.wait()

    attempts, come = Attempts(sleep=sleep), []

    async def tries(name: str) -> None:
        with suppress(TooManyWaiting):
            async with attempts.turn("10.0.0.1", name):
                come.append(name)

    async def run() -> None:
        tasks = [asyncio.create_task(tries("ann")) for _ in range(100)]
        tasks += [asyncio.create_task(tries(f"ben{each}")) for each in range(100)]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*tasks)

    awaited(run())
    assert (come.count("ann"), len(come)) == (4, 16)
    assert (len(attempts._lines), attempts._waiting.total()) == (0, 0)


def test_crowds_are_told_to_come_back(attempts: Attempts) -> None:
    web = visitor(Middleware(Logins, attempts=attempts))
    attempts._waiting["testclient", "ann"] = 4
    attempts._waiting["an unknown address", "ann"] = 4
    answer = web.post("/login", data=RIGHT)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")


def test_wrong_passwords_are_logged_without_them(
    attempts: Attempts, caplog: pytest.LogCaptureFixture
) -> None:
    web = visitor(Middleware(Logins, attempts=attempts))
    wrong = {"username": "ann\x1b[2J\n\u202e", "password": "hunter2"}
    with caplog.at_level(logging.WARNING):
        web.post("/login", data=wrong)
        web.post("/login", files={"a": b"b"}, data=wrong)  # another kind of form
        web.post("/login", content=b"\xff", headers={"content-type": "multipart/form-data"})
    first = caplog.messages[0]
    assert first.startswith(r"wrong password for 'ann\x1b[2J\n\u202e' from ")
    assert all(each.isprintable() for each in caplog.messages)
    assert "hunter2" not in caplog.text
    web.post("/login", data={"username": "a" * 10_000, "password": "b"})
    assert len(caplog.messages[-1]) < 200
    assert web.post("/login", content=b"a" * 20_000).status_code == 413


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("192.168.1.7", "192.168.1.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("testclient", "an unknown address"),
    ],
)
def test_a_network_is_one_address(host: str, known: str) -> None:
    assert address_of({"type": "http", "client": (host, 1)}) == known


def test_an_address_alone_logs_nobody_out() -> None:
    ann: Any = logged_in(SmallApp([Middleware(Routes, locked=False), Middleware(Logins)]), "ann")
    asked = ann.get("/logout")
    assert "<button>" in asked.text  # not what the app says
    assert asked.headers["referrer-policy"] == "same-origin"
    assert "x-method" not in asked.headers
    assert ann.post("/logout").headers["x-method"] == "GET"  # as gradio has it
    assert ann.post("/logout", headers={"origin": "http://elsewhere"}).status_code == 403


def test_what_is_remembered_of_strangers_is_bounded(attempts: Attempts) -> None:
    for number in range(20_000):
        attempts.missed(f"address {number}", f"name {number}")
    assert len(attempts._missed) == 10_000
