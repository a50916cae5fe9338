"""What is sent: no more than anyone types, nothing to fetch, and nothing about other users."""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlite.config.plain_json import NotPlain, read_json
from kvlite.web.sending import Bodies, TooMuch, TooSlow

from .routes import user_of

_LOG = logging.getLogger(__name__)

_TOO_MUCH = {413: "This is too long.", 503: "Too much is sent at once: try again."}
# Tabs of a user's that are remembered, and characters of what a tab is known by.
_TABS, _NAME = 1_000, 100
_HEARTBEAT, _CALL = "/gradio_api/heartbeat/", "/gradio_api/call/"


def sent_again(body: bytes, receive: Receive) -> Receive:
    """Where an app receives what was read already."""
    unread = [body]

    async def again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return again


class Sessions:
    """Whose each tab is: what is shown there is nobody else's to follow, or to end."""

    def __init__(self) -> None:
        self._owner: dict[str, str] = {}
        self._tabs: dict[str, OrderedDict[str, None]] = {}

    def is_of(self, session: str, user: str) -> bool:
        """Whether a tab is this user's, as it is from now on if it was nobody's."""
        if len(session) > _NAME or self._owner.setdefault(session, user) != user:
            return False
        tabs = self._tabs.setdefault(user, OrderedDict())
        tabs[session] = None
        tabs.move_to_end(session)
        if len(tabs) > _TABS:
            del self._owner[tabs.popitem(last=False)[0]]
        return True


class BodyFilter:
    """Refuses what names a file by an address, which gradio would fetch; what is about another
    user's tab or event; and more than anyone types."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.sessions = Sessions()
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or refuse."""
        if scope["type"] != "http" or is_upload(scope):
            await self.app(scope, receive, send)
            return
        try:
            if _looks(scope):
                await self._answer(scope, None)(scope, receive, send)
                return
            async with self._bodies.read(scope, receive) as body:
                plain = await self._bodies.look(body, _plain)
                await self._answer(scope, plain)(scope, sent_again(body, receive), send)
        except TooMuch as error:
            refused = PlainTextResponse(_TOO_MUCH[error.status], error.status)
            await refused(scope, receive, send)
        except TooSlow:
            await PlainTextResponse("This comes too slowly.", 408)(scope, receive, send)
        except ClientDisconnect:
            return

    def _answer(self, scope: Scope, plain: Any) -> ASGIApp:
        return self._refusal(scope, plain) or _answering(self.app)

    def _refusal(self, scope: Scope, plain: Any) -> PlainTextResponse | None:
        if isinstance(plain, NotPlain):
            return PlainTextResponse(f"{plain}.", 400)
        kind = Request(scope).headers.get("content-type", "").partition(";")[0].strip().lower()
        if _takes_json(scope) and not (kind == "application/json" and isinstance(plain, dict)):
            return PlainTextResponse("Send a JSON object, as application/json.", 400)
        if _names_an_address(plain):
            return PlainTextResponse("Files are uploaded here, not fetched.", 403)
        user = user_of(scope) or ""
        own = all(self.sessions.is_of(each, user) for each in _tabs(scope, plain))
        if own and all(_asker(scope, each) in (None, user) for each in _events(scope, plain)):
            return None
        return PlainTextResponse("This is another user's.", 403)


def _answering(app: ASGIApp) -> ASGIApp:
    """The app, which answers in a sentence where gradio stumbles over what was sent."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await app(scope, receive, sent)
        except ClientDisconnect:
            raise
        except Exception as error:
            if begun:
                raise
            _LOG.warning("%s could not be answered: %s", scope["path"], type(error).__name__)
            said = {"error": "Something is wrong with what was sent: load the page again."}
            await JSONResponse(said, status_code=500)(scope, receive, send)

    return answer


def _looks(scope: Scope) -> bool:
    """Whether nothing is sent with a request."""
    return scope["method"] in ("GET", "HEAD")


def is_upload(scope: Scope) -> bool:
    """Whether a request brings files."""
    return (scope["method"], scope["path"].rstrip("/")) == ("POST", "/gradio_api/upload")


def _takes_json(scope: Scope) -> bool:
    """Whether what is sent there can only be JSON: gradio stumbles over anything else."""
    return not _looks(scope) and scope["path"].startswith("/gradio_api/")


def _plain(body: bytes) -> Any:
    """What is sent as JSON, or what is wrong with it; None if it is none."""
    try:
        return read_json(body.decode())
    except NotPlain as error:
        return error
    except ValueError:
        return None


def _tabs(scope: Scope, plain: Any) -> Iterator[str]:
    query = scope.get("query_string", b"").decode("latin-1")
    yield from parse_qs(query, keep_blank_values=True).get("session_hash", ())
    if scope["path"].startswith(_HEARTBEAT):
        yield scope["path"].removeprefix(_HEARTBEAT).rstrip("/")
    if isinstance(plain, dict) and isinstance(plain.get("session_hash"), str):
        yield plain["session_hash"]


def _events(scope: Scope, plain: Any) -> Iterator[str]:
    if scope["path"].startswith(_CALL) and scope["method"] != "POST":
        yield scope["path"].rstrip("/").rpartition("/")[2]
    if isinstance(plain, dict) and isinstance(plain.get("event_id"), str):
        yield plain["event_id"]


def _asker(scope: Scope, event: str) -> str | None:
    """Who asked for an event, None if there is none of this id; "" where nobody logs in."""
    found: Any = scope["app"].get_blocks()._queue.event_ids_to_events.get(event)
    return None if found is None else found.username or ""


def _names_an_address(plain: Any) -> bool:
    """Whether somewhere in what is sent a file's path is an address."""
    inner = [plain]
    while inner:
        each = inner.pop()
        if isinstance(each, dict):
            if str(each.get("path", "")).strip().lower().startswith(("http:", "https:")):
                return True
            inner += each.values()
        elif isinstance(each, list):
            inner += each
    return False
