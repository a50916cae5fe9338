"""What browsers are told: that a page may ask, and read the answer."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope, Send

# Seconds for which a browser need not ask again.
_LASTS = "600"
_ASKED = "access-control-request-"


def is_preflight(scope: Scope, sent: Headers) -> bool:
    """Whether a browser asks if a page may send a request, before it sends it, and without its
    key."""
    return scope["method"] == "OPTIONS" and "origin" in sent and f"{_ASKED}method" in sent


def preflight(sent: Headers) -> Response:
    """What the browser is told if the page may."""
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": sent.get(f"{_ASKED}headers", "*"),
        "Access-Control-Max-Age": _LASTS,
    }
    if sent.get(f"{_ASKED}private-network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=headers)


def telling(send: Send, origin: str | None) -> Send:
    """As `send`, with the headers by which pages of an origin may read an answer; None if they may
    not, or no page asks."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.add_vary_header("Origin")
            if origin is not None:
                headers["Access-Control-Allow-Origin"] = origin
                headers["Access-Control-Expose-Headers"] = "Retry-After"
        await send(message)

    return sending
