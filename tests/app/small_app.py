"""An app as gradio's is seen from before it, which says what it was sent."""

from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

USERS = {"ann": "secret", "ben": "other"}


class Event:
    """Something that a user asked for."""

    def __init__(self, username: str | None) -> None:
        self.username = username


class SmallApp(Starlette):
    """Answers everything, with who is logged in as gradio knows it.

    Attributes:
        events: that somebody asked for, by their ids.
    """

    def __init__(self, guards: list[Middleware]) -> None:
        every = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]
        routes = [
            Route("/login", self.log_in, methods=["POST"]),
            Route("/{path:path}", self.echo, methods=every),
        ]
        super().__init__(routes=routes, middleware=guards)
        self.cookie_id = "x"
        self.tokens = dict[str | None, str]()
        self.events = dict[str, Event]()

    def get_blocks(self) -> Any:
        """As gradio's queue is reached."""
        queue = type("Queue", (), {"event_ids_to_events": self.events})
        return type("Blocks", (), {"_queue": queue})

    async def log_in(self, request: Request) -> Response:
        """As gradio does."""
        form = await request.form()
        name = str(form.get("username"))
        if USERS.get(name.strip()) != form.get("password"):
            return JSONResponse({"detail": "Incorrect credentials."}, 400)
        self.tokens[f"token of {name}"] = name
        answer = JSONResponse({"success": True})
        kinds: dict[str, Any] = {"httponly": True, "samesite": "none", "secure": True}
        answer.set_cookie("access-token-x", f"token of {name}", **kinds)
        answer.set_cookie("access-token-unsecure-x", f"token of {name}", httponly=True)
        return answer

    async def echo(self, request: Request) -> Response:
        """What was sent, and how."""
        return Response(await request.body(), headers={"x-method": request.method})


def visitor(*guards: Middleware, base: str = "http://testserver") -> TestClient:
    """Someone who asks a small app behind these."""
    return TestClient(SmallApp([*guards]), base_url=base, follow_redirects=False)


def logged_in(app: Any, name: str) -> TestClient:
    """Someone who has logged in there."""
    client = TestClient(app, follow_redirects=False)
    client.cookies.set("access-token-x", f"token of {name}")
    app.tokens[f"token of {name}"] = name
    return client
