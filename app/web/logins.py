"""Logging in, which takes longer the more often a password was wrong; and logging out."""

import asyncio
import ipaddress
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlite.web.sending import parts_of

from .bodies import sent_again

_LOG = logging.getLogger(__name__)
# Wrong passwords that cost nothing; seconds that the next one costs, twice as many with each, and
# at most for an address and for a name, which others must not lock anyone out of.
_FREE, _FIRST, _MOST_ADDRESS, _MOST_NAME = 3, 0.5, 30.0, 5.0
# Seconds after which nobody remembers them, and how many addresses and names are remembered.
_FORGOTTEN, _REMEMBERED = 900.0, 10_000
# Who waits: from one address for one name, from one address, and in all.
_LINE, _LINES, _WAITING = 4, 16, 256
_LARGEST, _SHOWN = 16 << 10, 50
_LOGOUT = """<!doctype html><html lang="en"><head><title>Log out of kvlite</title></head><body>
<form method="post" action="logout"><button>Log out of kvlite</button></form></body></html>"""


class TooManyWaiting(Exception):
    """More wait to log in than may."""


class Attempts:
    """Wrong passwords of late, by address and by name."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._missed: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lines: dict[tuple[str, str], asyncio.Lock] = {}
        self._waiting = Counter[tuple[str, str]]()

    @asynccontextmanager
    async def turn(self, address: str, name: str) -> AsyncIterator[None]:
        """The time to try a password, one after another from an address for a name. Raises
        TooManyWaiting if too many wait already."""
        key = address, name
        of_address = sum(many for (each, _), many in self._waiting.items() if each == address)
        if self._waiting[key] >= _LINE or of_address >= _LINES or self._waiting.total() >= _WAITING:
            raise TooManyWaiting
        self._waiting[key] += 1
        try:
            async with self._lines.setdefault(key, asyncio.Lock()):
                await self._sleep(self.seconds(address, name))
                yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._lines[key]

    def seconds(self, address: str, name: str) -> float:
        """How long whoever tries now waits first."""
        return max(
            min(_MOST_ADDRESS, self._cost(f"address {address}")),
            min(_MOST_NAME, self._cost(f"name {name}")),
        )

    def missed(self, address: str, name: str) -> int:
        """A password was wrong; how often they were from this address."""
        for key in (f"name {name}", f"address {address}"):
            times = self._times(key) + 1
            self._missed[key] = times, self._clock()
            self._missed.move_to_end(key)
        while len(self._missed) > _REMEMBERED:
            self._missed.popitem(last=False)
        return times

    def _cost(self, key: str) -> float:
        over = self._times(key) - _FREE
        return 0.0 if over < 0 else _FIRST * 2.0 ** min(over, 10)

    def _times(self, key: str) -> int:
        times, last = self._missed.get(key, (0, 0.0))
        return times if self._clock() - last < _FORGOTTEN else 0


class Logins:
    """Answers who logs in or out; all else goes on."""

    def __init__(self, app: ASGIApp, attempts: Attempts | None = None) -> None:
        self.app = app
        self.attempts = attempts or Attempts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, in time."""
        path = scope["path"].rstrip("/") if scope["type"] == "http" else ""
        if path == "/login" and scope["method"] == "POST":
            await self._log_in(scope, receive, send)
        elif path == "/logout" and scope["method"] == "POST":
            await self.app({**scope, "method": "GET"}, receive, send)
        elif path == "/logout":
            # An address alone, as of a picture on a page of elsewhere, logs nobody out. The
            # browser says where the button was only if the page lets it.
            asked = HTMLResponse(_LOGOUT, headers={"referrer-policy": "same-origin"})
            await asked(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _log_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = bytearray()
        try:
            async for part in parts_of(scope, receive):
                read += part
                if len(read) > _LARGEST:
                    await JSONResponse({"detail": "This is too long."}, 413)(scope, receive, send)
                    return
        except ClientDisconnect:
            return
        body = bytes(read)
        name, address = await _name(scope, body, receive), address_of(scope)
        status = 0

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            async with self.attempts.turn(address, name):
                await self.app(scope, sent_again(body, receive), sent)
                if status == 400:
                    times = self.attempts.missed(address, name)
                    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"
                    # As Python writes it: what would steer a terminal is escaped.
                    _LOG.warning("wrong password for %r from %s, %d of late", shown, address, times)
        except TooManyWaiting:
            told = {"detail": "Too many log in at once: wait half a minute, and try again."}
            wait = {"Retry-After": "30"}
            await JSONResponse(told, 429, headers=wait)(scope, receive, send)


def address_of(scope: Scope) -> str:
    """Where a request comes from; of IPv6 the network, of which one machine has every address."""
    host = (scope.get("client") or ("",))[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return "an unknown address"
    if found.version == 4:
        return str(found)
    mapped = found.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(found), 64), strict=False))


async def _name(scope: Scope, body: bytes, receive: Receive) -> str:
    if not Headers(scope=scope).get("content-type"):
        return ""
    try:
        form = await Request(scope, sent_again(body, receive)).form(max_files=0, max_fields=20)
    except Exception:  # gradio will not read it either
        return ""
    name = form.get("username")
    return name.strip() if isinstance(name, str) else ""
