"""Which of gradio's routes there are, and which of them need no login.

Gradio has many more, of which nothing here needs any: they make videos, fetch addresses, show files
and tokens, and not all of them ask who is there.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlite.web.origins import is_own

_API = "/gradio_api"
_LOOKS, _SENDS = ("GET", "HEAD"), ("POST",)
# Told to anybody: the page that asks for a password, and what it is made of.
_OPEN = {
    **dict.fromkeys(("/", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt"), _LOOKS),
    **dict.fromkeys((f"{_API}/theme.css", f"{_API}/startup-events", f"{_API}/app_id"), _LOOKS),
    "/login": _SENDS,
    "/logout": (*_LOOKS, "POST"),
}
_OPEN_UNDER = ("/assets/", "/static/", "/svelte/")
_OWN = {
    "/config": _LOOKS,
    **dict.fromkeys((f"{_API}/{each}" for each in ("info", "user", "login_check")), _LOOKS),
    **dict.fromkeys((f"{_API}/queue/{each}" for each in ("data", "status")), _LOOKS),
    f"{_API}/upload_progress": _LOOKS,
    **dict.fromkeys((f"{_API}/{each}" for each in ("queue/join", "cancel", "reset")), _SENDS),
    f"{_API}/upload": _SENDS,
}
_OWN_UNDER = {
    f"{_API}/heartbeat/": _LOOKS,
    f"{_API}/call/": (*_LOOKS, "POST"),
    f"{_API}/run/": _SENDS,
    f"{_API}/api/": _SENDS,
}


class Routes:
    """Answers this app's own pages, and programs, at the routes that there are: all but a few of
    them once someone has logged in."""

    def __init__(self, app: ASGIApp, locked: bool) -> None:
        """`locked` is whether one has to log in."""
        self.app = app
        self.locked = locked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or refuse."""
        answer: ASGIApp = self.app
        if scope["type"] == "http":
            path, method = scope["path"].rstrip("/") or "/", scope["method"]
            is_open = path.startswith(_OPEN_UNDER)
            methods = _OPEN.get(path) or (_LOOKS if is_open else _methods(path))
            if not is_own(scope):
                answer = PlainTextResponse("This is another page's request.", status_code=403)
            elif not methods:
                answer = PlainTextResponse("There is nothing here.", status_code=404)
            elif method not in methods:
                allowed = {"Allow": ", ".join(methods)}
                answer = PlainTextResponse("Not so.", status_code=405, headers=allowed)
            elif self.locked and not (path in _OPEN or is_open) and user_of(scope) is None:
                told = {"error": "Not authenticated", "auth_message": None}
                answer = JSONResponse({"detail": told}, status_code=401)
        elif scope["type"] == "websocket":
            return
        await answer(scope, receive, send)


def user_of(scope: Scope) -> str | None:
    """Who is logged in, as gradio knows it by a cookie; None if nobody is."""
    app: Any = scope["app"]
    cookies = Request(scope).cookies
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    token = next(filter(None, map(cookies.get, names)), None)
    user: str | None = app.tokens.get(token)
    return user


def _methods(path: str) -> tuple[str, ...]:
    for start, methods in _OWN_UNDER.items():
        if path.startswith(start):
            return methods
    return _OWN.get(path, ())
