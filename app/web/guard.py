"""Who may come in, from where, and with what."""

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlite.errors import SettingError

# Bytes a document may have, and whatever else is sent.
LARGEST, LONGEST = 200 << 20, 32 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")

# Nothing is fetched from elsewhere, whatever an answer or a document has in it. The page itself
# brings scripts and styles within it.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "media-src 'self' data: blob:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


def plain_host(host: str) -> str:
    """A host as a socket takes it."""
    host = host.strip().lower()
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, as people write one: `LOCALHOST`, `[::1]`."""
    host = plain_host(host)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_auth(pairs: Sequence[str], variable: str = "") -> list[tuple[str, str]]:
    """Users and their passwords, as written: `name:password`. Spaces around a name are none of it.

    Args:
        variable: what KVLITE_AUTH holds, one more of them.

    Raises:
        SettingError: one has no name or no password, or a name comes twice, or a password
            has a space around it.
    """
    called = [(f"--auth number {number}", pair) for number, pair in enumerate(pairs, 1)]
    found: dict[str, str] = {}
    for name, pair in [*called, *([("KVLITE_AUTH", variable)] if variable else [])]:
        user, _, password = pair.partition(":")
        user = user.strip()
        if not (user and password.strip()):
            raise SettingError(f"{name} is not NAME:PASSWORD: give both")
        if password != password.strip():
            raise SettingError(f"{name} has a space before or after its password: leave it out")
        if user in found:
            raise SettingError(f"{name} names a user for the second time: give each one once")
        found[user] = password
    return list(found.items())


@dataclass(frozen=True)
class Door:
    """How the app is reached.

    Attributes:
        host: the address it is served on.
        port: tried first; the next free one of a hundred is taken.
        auth: users and their passwords; without any nobody has to log in.
        share: let gradio's servers lead others here.
        browser: open one.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    auth: Sequence[tuple[str, str]] = ()
    share: bool = False
    browser: bool = False

    @property
    def is_private(self) -> bool:
        """Whether only this machine comes in by it."""
        return is_loopback(self.host) and not self.share

    def require_password(self) -> None:
        """Raises SettingError if others could come in without one."""
        if self.auth or self.is_private:
            return
        how = "--share" if self.share else f"--host {self.host}"
        raise SettingError(
            f"{how} lets others in, who could read every conversation: give --auth NAME:PASSWORD, "
            "or leave it out to be reached from this machine alone"
        )

    def middleware(self) -> list[Middleware]:
        """What stands before every request.

        A page of elsewhere could give its own name this machine's address, and read what is here:
        so requests to a loopback address must call it by a loopback name. Nor may such a page send
        anything, even if it could not read the answer.
        """
        guards = [Middleware(Headers)]
        if self.is_private:
            guards.append(Middleware(TrustedHostMiddleware, allowed_hosts=[*_LOOPBACK, self.host]))
            guards.append(Middleware(OwnPages))
        return [*guards, Middleware(OwnFiles)]


class OwnPages:
    """Refuses what a browser sends for a page of elsewhere, such as files that fill the disk."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or refuse."""
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            sent = Request(scope).headers
            origin = sent.get("origin")
            if origin is not None and origin.partition("://")[2] != sent.get("host"):
                await _refused("This is another page's request.", 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class OwnFiles:
    """Refuses what names a file by an address, which gradio would fetch; and more than anyone
    types."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or refuse."""
        if scope["type"] != "http" or scope["method"] != "POST" or _is_upload(scope):
            await self.app(scope, receive, send)
            return
        body = bytearray()
        try:
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > LONGEST:
                    await _refused("This is too long.", 413)(scope, receive, send)
                    return
        except ClientDisconnect:
            return
        if _names_an_address(bytes(body)):
            await _refused("Files are uploaded here, not fetched.", 403)(scope, receive, send)
            return
        unread = [bytes(body)]

        async def again() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self.app(scope, again, send)


def _is_upload(scope: Scope) -> bool:
    """Whether a request brings files, by the header that whoever reads it goes by."""
    return Request(scope).headers.get("content-type", "").startswith("multipart/")


def _refused(sentence: str, status: int) -> PlainTextResponse:
    return PlainTextResponse(sentence, status_code=status)


def _names_an_address(body: bytes) -> bool:
    """Whether somewhere in what is sent a file's path is an address."""
    try:
        inner: list[Any] = [json.loads(body)]
    except (ValueError, RecursionError):  # the app will not read it either
        return False
    while inner:
        plain = inner.pop()
        if isinstance(plain, dict):
            if str(plain.get("path", "")).strip().lower().startswith(("http:", "https:")):
                return True
            inner += plain.values()
        elif isinstance(plain, list):
            inner += plain
    return False


class Headers:
    """Adds to every answer what a browser must not do with it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, with the headers."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        await self.app(scope, receive, sent)
