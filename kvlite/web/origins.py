"""Whose page a request comes from."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_LOOKS = ("GET", "HEAD")


class SameOrigin:
    """Refuses what a browser sends for a page of elsewhere, which could act for whoever is logged
    in: send files, end an answer, log out. Programs, and what is typed, come through.

    A browser says itself whether a page is the app's own (`Sec-Fetch-Site`), whatever stands
    between; where it does not, as for an address without https, the page's host must be the one
    that is asked. What a proxy says of that (`X-Forwarded-Host`) anybody may say, and counts for
    nothing: behind one, have it pass `Host` on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or refuse."""
        if scope["type"] == "http" and not is_own(scope):
            refused = PlainTextResponse("This is another page's request.", status_code=403)
            await refused(scope, receive, send)
            return
        await self.app(scope, receive, send)


def is_own(scope: Scope) -> bool:
    """Whether a request comes from a program, or from a page of this very server."""
    sent = Headers(scope=scope)
    site, origin, referer = (sent.get(each) for each in ("sec-fetch-site", "origin", "referer"))
    # A link from elsewhere leads to the page; it does nothing there.
    comes_to_look = scope["method"] in _LOOKS and scope["path"] == "/"
    if site is not None:
        navigates = sent.get("sec-fetch-mode") == "navigate"
        return site in ("same-origin", "none") or (comes_to_look and navigates)
    if origin is not None:
        return _is_of(origin, sent)
    return referer is None or comes_to_look or _is_of(referer, sent)


def _is_of(place: str, sent: Headers) -> bool:
    """Whether an address is of the host that is asked."""
    try:
        return urlsplit(place).netloc == sent.get("host")
    except ValueError:
        return False
