"""Who may come in, from where, and with how much."""

import hmac
import json
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlite.server.config import ServerConfig
from kvlite.server.refusals import Refusal
from kvlite.web.origins import LOOPBACK, is_own
from kvlite.web.sending import LONGEST, Bodies, TooMuch

_TOO_MUCH = {
    413: f"a request has at most {LONGEST:,} bytes",
    503: "too much is sent at once: try again",
}


class Guard:
    """Refuses who has no key, what comes from a page of elsewhere, and what is too much at once.

    A page of elsewhere could give its own name this machine's address, and read what is here: so
    requests to a loopback address must call it by a loopback name.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app, self.config = app, config
        self._keys = [key.encode() for key in config.keys]
        self._names = {*LOOPBACK, config.host}
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or refuse."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._refusal(scope, Headers(scope=scope))
        if refused is not None:
            await refused.response()(scope, receive, send)
            return
        self.open += 1
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            return
        finally:
            self.open -= 1

    def _refusal(self, scope: Scope, sent: Headers) -> Refusal | None:
        if self.config.is_private and _host(sent) not in self._names:
            return Refusal("this server is reached as 127.0.0.1 or localhost alone", 403)
        if not is_own(scope):
            return Refusal("web pages of elsewhere may not use this server", 403)
        if self._keys and not self._has_key(sent):
            said = "give a key of this server: Authorization: Bearer KEY"
            return Refusal(said, 401, code="invalid_api_key")
        if self.open >= self.config.requests and scope["method"] == "POST":
            said = f"{self.open} requests are open already: try again later"
            return Refusal(said, 429, code="too_many_requests")
        return None

    def _has_key(self, sent: Headers) -> bool:
        """Whether there is a key, in a time that does not tell how much of it is right."""
        scheme, _, given = sent.get("authorization", "").partition(" ")
        key = (given.strip() if scheme.lower() == "bearer" else "").encode()
        return sum(hmac.compare_digest(key, own) for own in self._keys) > 0


async def object_of(bodies: Bodies, request: Request) -> dict[str, Any]:
    """What a request says. Raises Refusal if it is too long, or no JSON object in UTF-8, and
    ClientDisconnect if whoever sends it has gone, or sends no more."""
    try:
        async with bodies.read(request.scope, request.receive) as body:
            plain = json.loads(body.decode(), parse_constant=_no_number)
    except TooMuch as error:
        raise Refusal(_TOO_MUCH[error.status], error.status) from None
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is not UTF-8 (byte {error.start}): encode it so") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {_first(error)}") from None
    if not isinstance(plain, dict):
        raise Refusal("the body is not a JSON object: send one")
    return plain


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number in JSON")


def _first(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).partition("\n")[0][:200]


def _host(sent: Headers) -> str:
    try:
        name = urlsplit(f"//{sent.get('host', '')}").hostname or ""
    except ValueError:
        return ""
    return f"[{name}]" if ":" in name else name
