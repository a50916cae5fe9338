"""Who may come in, from where, and with how much."""

import hmac
import re
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlite.config.plain_json import NotPlain, read_json
from kvlite.server.config import ServerConfig
from kvlite.server.cors import is_preflight, preflight, telling
from kvlite.server.refusals import Refusal
from kvlite.web.origins import LOOPBACK, is_let_in, is_own
from kvlite.web.sending import LONGEST, Bodies, TooMuch

_T = TypeVar("_T")
# Bodies that may be arriving for each request that may be open.
_ARRIVING = 16
# Fields with lists of tokens.
_TOKENS = ("prompt", "tokens")
# What a sentence may quote.
_PLAIN = re.compile(r"[a-z0-9.:/\[\]_-]{1,200}")
_TOO_MUCH = {
    413: f"a request has at most {LONGEST:,} bytes",
    503: "too much is sent at once: try again",
}


class Guard:
    """Refuses who has no key, what comes from a page of elsewhere, and what is too much at once.

    A page of elsewhere could give its own name this machine's address, and read what is here: so
    requests to a loopback address must call it by a loopback name, or one that was allowed.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app, self.config = app, config
        self._keys = [key.encode() for key in config.keys]
        self._names = {*LOOPBACK, config.host, *config.hosts}
        self.open = self.arriving = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or refuse."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = Headers(scope=scope)
        origin = sent.get("origin")
        lets_in = origin is not None and is_let_in(origin, self.config.origins)
        send = telling(send, origin if lets_in else None)
        refused = self._refusal(scope, sent, lets_in=lets_in)
        if refused is not None:
            await refused.response(scope["path"])(scope, receive, send)
            return
        if is_preflight(scope, sent):
            await preflight(sent)(scope, receive, send)
            return
        self.arriving += 1
        has_come = is_open = False

        async def received() -> Message:
            """What comes; once all has, the request is open, if there is a place."""
            nonlocal has_come, is_open
            message = await receive()
            if not has_come and not message.get("more_body", False):
                has_come, self.arriving = True, self.arriving - 1
                if (full := self._full(scope)) is not None:
                    raise full
                is_open, self.open = True, self.open + 1
            return message

        try:
            await self.app(scope, received, send)
        except ClientDisconnect:
            return
        finally:
            self.arriving -= not has_come
            self.open -= is_open

    def _refusal(self, scope: Scope, sent: Headers, *, lets_in: bool) -> Refusal | None:
        """Why a request is not answered; `lets_in` if it is of a page that may use this server."""
        if self.config.is_private and (host := _host(sent)) not in self._names:
            said = "this server is reached as 127.0.0.1 or localhost alone"
            flag = f"--allow-host {_shown(host, 'NAME')}"
            return Refusal(f"{said}: `kvlite serve {flag}` adds a name", 403)
        if not lets_in and not is_own(scope) and "*" not in self.config.origins:
            said = "web pages of elsewhere may not use this server"
            flag = f"--allow-origin {_shown(sent.get('origin', ''), 'ORIGIN')}"
            return Refusal(f"{said}: `kvlite serve {flag}` lets them in", 403)
        if self._keys and not is_preflight(scope, sent) and not self._has_key(sent):
            said = "give a key of this server: Authorization: Bearer KEY, or x-api-key: KEY"
            return Refusal(said, 401, code="invalid_api_key")
        return self._full(scope)

    def _full(self, scope: Scope) -> Refusal | None:
        """Why a request must wait: those count that have come whole. Others, which are cut where
        they come too slowly (`web.sending`), have many more places."""
        most = self.config.requests
        if scope["method"] != "POST" or (self.open < most and self.arriving < _ARRIVING * most):
            return None
        said = f"{self.open} requests are open already: try again later"
        return Refusal(said, 429, code="too_many_requests")

    def _has_key(self, sent: Headers) -> bool:
        """Whether there is a key, in a time that does not tell how much of it is right."""
        scheme, _, given = sent.get("authorization", "").partition(" ")
        bearer = given if scheme.lower() == "bearer" else ""
        key = (bearer or sent.get("x-api-key", "")).strip().encode()
        return sum(hmac.compare_digest(key, own) for own in self._keys) > 0


async def object_of(bodies: Bodies, request: Request, made: Callable[[dict[str, Any]], _T]) -> _T:
    """What is `made` of what a request says. Raises Refusal if it is too long, or no JSON object in
    UTF-8, and ClientDisconnect if whoever sends it has gone, or sends no more."""
    try:
        async with bodies.read(request.scope, request.receive) as body:
            return await bodies.look(body, lambda body: made(_object(body)))
    except TooMuch as error:
        raise Refusal(_TOO_MUCH[error.status], error.status) from None


def _object(body: bytes) -> dict[str, Any]:
    try:
        plain = read_json(body.decode(), _TOKENS)
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is not UTF-8 (byte {error.start}): encode it so") from None
    except NotPlain as error:
        raise Refusal(str(error), param=error.field or None) from None
    except ValueError as error:
        said = str(error).partition("\n")[0][:200]
        raise Refusal(f"the body is not JSON: {said}") from None
    if not isinstance(plain, dict):
        raise Refusal("the body is not a JSON object: send one")
    return plain


def _shown(given: str, otherwise: str) -> str:
    """What a flag would be given, if it can be."""
    return given if _PLAIN.fullmatch(given) and given != "null" else otherwise


def _host(sent: Headers) -> str:
    try:
        name = urlsplit(f"//{sent.get('host', '')}").hostname or ""
    except ValueError:
        return ""
    return f"[{name}]" if ":" in name else name
