"""What stands before gradio: whose page asks, which routes there are, and whose tabs and events."""

import asyncio
import json
from typing import Any

import pytest
from starlette.middleware import Middleware

from kvlite.web import sending
from kvlite_app.web.bodies import BodyFilter
from kvlite_app.web.guard import SecurityHeaders, ServerConfig
from kvlite_app.web.routes import Routes
from tests.app.conftest import awaited
from tests.app.small_app import SmallApp, logged_in, visitor

RUN = "/gradio_api/run/say"
JSON = {"content-type": "application/json"}
FOREIGN = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "origin": "http://testserver"},
    {"sec-fetch-site": "cross-site", "x-forwarded-host": "elsewhere", "origin": "http://elsewhere"},
    {"origin": "http://elsewhere"},
    {"origin": "null"},
    {"origin": "http://[broken"},
    {"origin": "http://elsewhere", "x-forwarded-host": "elsewhere"},
    {"referer": "http://elsewhere/page"},
]
OWN = [
    {},  # a program
    {"sec-fetch-site": "same-origin", "origin": "https://behind-a-proxy"},
    {"sec-fetch-site": "none"},
    {"origin": "http://testserver"},
    {"referer": "http://testserver/"},
]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("headers", FOREIGN)
def test_what_another_page_sends_is_refused_wherever_the_app_is(
    host: str, headers: dict[str, str]
) -> None:
    server_config = ServerConfig(host, auth=[("ann", "secret")])
    assert Routes in [each.cls for each in server_config.middleware()]
    web = visitor(Middleware(Routes, locked=False))
    for method, path in (
        ("POST", "/gradio_api/upload"),
        ("POST", "/logout"),
        ("GET", "/logout"),
        ("OPTIONS", RUN),
        ("GET", "/config"),
    ):
        assert web.request(method, path, headers=headers).status_code == 403, (method, path)


@pytest.mark.parametrize("headers", OWN)
def test_own_pages_and_programs_come_through(headers: dict[str, str]) -> None:
    web = visitor(Middleware(Routes, locked=False))
    assert web.post("/gradio_api/upload", headers=headers).status_code == 200
    assert web.get("/config", headers=headers).status_code == 200


def test_a_link_from_elsewhere_leads_to_the_page() -> None:
    web = visitor(Middleware(Routes, locked=False))
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert web.get("/", headers=link).status_code == 200
    assert web.get("/", headers={"referer": "http://elsewhere/"}).status_code == 200
    assert web.get("/", headers={"origin": "http://elsewhere"}).status_code == 403  # it would read
    assert web.get("/logout", headers=link).status_code == 403


OPEN = ("/", "/theme.css", "/favicon.ico", "/assets/index.js", "/static/img/logo.svg", "/logout")
LOCKED = (
    ("GET", "/config"),
    ("GET", "/gradio_api/info"),
    ("GET", "/gradio_api/heartbeat/abc"),
    ("GET", "/gradio_api/queue/data"),
    ("GET", "/gradio_api/queue/status"),
    ("GET", "/gradio_api/upload_progress"),
    ("GET", "/gradio_api/call/say/abc"),
    ("POST", "/gradio_api/queue/join"),
    ("POST", "/gradio_api/cancel"),
    ("POST", "/gradio_api/reset"),
    ("POST", "/gradio_api/upload"),
    ("POST", "/gradio_api/call/say"),
    ("POST", "/gradio_api/api/say"),
    ("POST", RUN),
)
NOT_THERE = (
    ("GET", "/gradio_api/file=/etc/passwd"),
    ("GET", "/gradio_api/file=https://example.org/a"),
    ("GET", "/gradio_api/file/etc/passwd"),
    ("GET", "/gradio_api/proxy=https://example.org/a"),
    ("GET", "/gradio_api/token"),
    ("GET", "/gradio_api/stream/a/b/1/playlist.m3u8"),
    ("POST", "/gradio_api/stream/abc"),
    ("POST", "/gradio_api/stream/abc/close"),
    ("POST", "/gradio_api/component_server"),
    ("POST", "/gradio_api/process_recording"),
    ("POST", "/gradio_api/vibe-edit"),
    ("GET", "/gradio_api/custom_component/a/client/b/c"),
    ("GET", "/gradio_api/deep_link"),
    ("GET", "/gradio_api/dev/reload"),
    ("GET", "/gradio_api/openapi.json"),
    ("GET", "/monitoring/abc"),
    ("GET", "/monitoring"),
    ("GET", "/config.json"),
)


def test_who_has_not_logged_in_sees_the_login_alone() -> None:
    app = SmallApp([Middleware(Routes, locked=True)])
    stranger, ann = visitor(Middleware(Routes, locked=True)), logged_in(app, "ann")
    for path in OPEN:
        assert stranger.get(path).status_code == 200, path
    for method, path in LOCKED:
        for where in (path, f"{path}/"):
            assert stranger.request(method, where).status_code == 401, where
            assert ann.request(method, where).status_code == 200, where
    stranger.cookies.set("access-token-x", "guessed")
    assert stranger.get("/config").status_code == 401


def test_routes_that_nothing_here_needs_are_not_there() -> None:
    ann = logged_in(SmallApp([Middleware(Routes, locked=True)]), "ann")
    alone = visitor(Middleware(Routes, locked=False))
    for method, path in NOT_THERE:
        assert ann.request(method, path).status_code == 404, path
        assert alone.request(method, path).status_code == 404, path
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "POST"):
        assert alone.request(method, "/config").status_code == 405, method
    assert alone.get("/gradio_api/upload").status_code == 405


def test_what_a_browser_remembers_of_a_login_goes_to_this_app_alone() -> None:
    login = {"username": "ann", "password": "secret"}
    plain = visitor(Middleware(SecurityHeaders)).post("/login", data=login)
    cookies = plain.headers.get_list("set-cookie")
    assert len(cookies) == 2
    for each in cookies:
        assert "samesite=lax" in each.lower()
        assert "httponly" in each.lower()
    (only,) = (
        visitor(Middleware(SecurityHeaders), base="https://testserver")
        .post("/login", data=login)
        .headers.get_list("set-cookie")
    )
    assert "secure" in only.lower().split("; ")


@pytest.fixture
def users() -> Any:
    """Two users of one app."""
    app = SmallApp([Middleware(BodyFilter)])
    return app, logged_in(app, "ann"), logged_in(app, "ben")


@pytest.mark.long
def test_a_tab_is_nobody_else_s(users: Any) -> None:
    _, ann, ben = users
    body = {"session_hash": "hers"}
    assert ann.post("/gradio_api/queue/join", json=body).status_code == 200
    for answer in (
        ben.post("/gradio_api/queue/join", json=body),
        ben.post("/gradio_api/cancel", json=body),
        ben.get("/gradio_api/queue/data?session_hash=hers"),
        ben.get("/gradio_api/queue/data?session_hash=his&session_hash=hers"),
        ben.get("/gradio_api/heartbeat/hers"),
    ):
        assert (answer.status_code, answer.text) == (403, "This is another user's.")
    for number in range(2_000):  # however many tabs he has
        assert ben.get(f"/gradio_api/heartbeat/his-{number}").status_code == 200
    assert ben.get("/gradio_api/heartbeat/hers").status_code == 403
    assert ann.get("/gradio_api/heartbeat/hers").status_code == 200
    assert ann.get(f"/gradio_api/heartbeat/{'a' * 101}").status_code == 403


def test_an_event_is_nobody_else_s(users: Any) -> None:
    app, ann, ben = users
    app.events["e1"] = type("Event", (), {"username": "ann"})()
    for path in ("/gradio_api/call/say/e1", "/gradio_api/call/v2/say/e1/"):
        assert ben.get(path).status_code == 403
        assert ann.get(path).status_code == 200
    body = {"session_hash": None, "event_id": "e1"}
    assert ben.post("/gradio_api/cancel", json=body).status_code == 403
    assert ann.post("/gradio_api/cancel", json=body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        '{"data": [{"path": "https://example.org/a.pdf", "meta": {"_type": "gradio.FileData"}}]}',
        '{"data": [[{"\\u0070ath": " HTTP://169.254.169.254/"}]]}',
    ],
)
def test_nothing_is_fetched_for_a_program_that_names_an_address(body: str) -> None:
    answer = visitor(Middleware(BodyFilter)).post(RUN, content=body, headers=JSON)
    assert answer.status_code == 403
    assert answer.text == "Files are uploaded here, not fetched."


def test_what_names_none_arrives_as_it_was_sent() -> None:
    body = '{"data": [{"path": "/tmp/a.pdf"}, "see \\"path\\": \\"https://example.org\\""]}'
    assert visitor(Middleware(BodyFilter)).post(RUN, content=body, headers=JSON).text == body
    assert visitor(Middleware(BodyFilter)).post("/logout", content="a=b").text == "a=b"


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data", ""])
@pytest.mark.parametrize(
    "body",
    [b"", b"a=b", b"[]", b"7", b"[" * 100_000, b'{"a"', b"\x80", '{"a": 1}'.encode("utf-16")],
)
def test_what_is_no_json_is_refused_before_gradio_stumbles(kind: str, body: bytes) -> None:
    answer = visitor(Middleware(BodyFilter)).post(RUN, content=body, headers={"content-type": kind})
    assert answer.status_code == 400


def test_more_than_anyone_types_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    web = visitor(Middleware(BodyFilter))
    many = json.dumps({"data": [{}] * 1_100_000})
    assert web.post(RUN, content=many, headers=JSON).status_code == 413  # 50 times as large, read
    monkeypatch.setattr(sending, "LONGEST", 10)
    assert web.post(RUN, content="a" * 11).status_code == 413
    monkeypatch.setattr(sending, "TOGETHER", 5)
    assert web.post(RUN, content="a" * 9).status_code == 503
    assert web.post(RUN, content="{}", headers=JSON).status_code == 200  # nothing is held any more


def test_who_sends_no_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "PATIENCE", 0.05)
    sent = list[Any]()

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": RUN, "headers": [], "query_string": b""}
        await BodyFilter(SmallApp([]))(scope, never, send)

    awaited(asyncio.wait_for(run(), 60))
    assert sent[0]["status"] == 408
