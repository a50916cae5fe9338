"""Who may call a server: pages by their origin, programs by the names of this machine."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.server.config import ServerConfig
from kvlite.web.origins import host_of, is_let_in, origin_of
from tests.server.conftest import Server, said, serving
from tests.server.test_refusing import CHAT, require_error

ALLOWED, KEY = "https://chat.example", {"Authorization": "Bearer secret"}
BODY = {"messages": said("Hi"), "max_tokens": 1}
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def open_server(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a key, for pages of one website, and for containers."""
    config = ServerConfig(
        keys=["secret"],
        origins=[ALLOWED],
        hosts=["host.docker.internal"],
        folder=tmp_path_factory.mktemp("open"),
    )
    with serving(settings, config) as found:
        yield found


def from_page(origin: str, site: str = "cross-site") -> dict[str, str]:
    """What a browser sends of a page's request."""
    return {"Origin": origin, "Sec-Fetch-Site": site, "Sec-Fetch-Mode": "cors"}


def readable(answer: httpx.Response, origin: str) -> bool:
    """Whether a browser lets the page read an answer."""
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers
    return bool(answer.headers.get("access-control-allow-origin") == origin)


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://localhost",
        "http://127.0.0.1:8080",
        "http://[::1]:5173",
        "vscode-webview://1ab2c3",
        "app://obsidian.md",
    ],
)
def test_pages_that_are_not_of_the_web_may_ask(server: Server, origin: str) -> None:
    answer = server.http.options(CHAT, headers={**from_page(origin), **ASKS})
    assert answer.status_code == 204 and not answer.content and readable(answer, origin)
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]
    answer = server.http.get("/v1/models", headers=from_page(origin, "same-site"))
    assert answer.json()["data"] and readable(answer, origin)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example:8000",
        "http://localhost:80@evil.example",
        "http://[",
        "file://localhost",
        "app:",
        "null",
        "*",
    ],
)
def test_pages_of_the_web_may_not(server: Server, origin: str) -> None:
    for answer in (
        server.http.options(CHAT, headers={**from_page(origin), **ASKS}),
        server.http.get("/v1/models", headers=from_page(origin)),
        server.http.post(CHAT, json=BODY, headers={"Origin": origin}),
    ):
        named = origin if origin == "https://evil.example" else ""
        require_error(answer, 403, f"`kvlite serve --allow-origin {named}".rstrip())
        assert not readable(answer, origin)
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_an_allowed_origin_may_read_all_answers(open_server: Server) -> None:
    page, http = from_page(ALLOWED), open_server.http
    asked = http.options(
        CHAT, headers={**page, **ASKS, "Access-Control-Request-Private-Network": "true"}
    )
    assert asked.status_code == 204 and readable(asked, ALLOWED)
    assert asked.headers["access-control-allow-private-network"] == "true"
    made = http.post(CHAT, json=BODY, headers={**page, **KEY})
    assert made.json()["choices"] and readable(made, ALLOWED)
    streamed = http.post(CHAT, json={**BODY, "stream": True}, headers={**page, **KEY})
    assert streamed.text.endswith("[DONE]\n\n") and readable(streamed, ALLOWED)
    for wrong, status in (
        (http.post(CHAT, json=BODY, headers=page), 401),
        (http.post(CHAT, json={}, headers={**page, **KEY}), 400),
        (http.get("/v1/nothing", headers={**page, **KEY}), 404),
    ):
        require_error(wrong, status, "")
        assert readable(wrong, ALLOWED)
        assert wrong.headers["access-control-expose-headers"] == "Retry-After"
    other = http.get("/v1/models", headers={**from_page("https://other.example"), **KEY})
    require_error(other, 403, "--allow-origin https://other.example")
    require_error(http.options(CHAT), 401, "")  # nobody's page asks


def test_requests_may_use_an_allowed_name(open_server: Server, server: Server) -> None:
    named = {"Host": "host.docker.internal:8000", **KEY}
    assert open_server.http.get("/health", headers=named).status_code == 200
    require_error(server.http.get("/health", headers=named), 403, "--allow-host host.docker.intern")
    # A page that gives its own name this machine's address is of elsewhere, whoever is let in.
    rebound = {"Host": "chat.example", "Origin": ALLOWED, **KEY}
    require_error(open_server.http.get("/health", headers=rebound), 403, "--allow-host chat.exampl")
    require_error(server.http.get("/health", headers={"Host": '"<b>"'}), 403, "--allow-host NAME")


def test_all_pages_may_ask_where_that_was_said(settings: Settings, tmp_path: Path) -> None:
    config = ServerConfig(origins=["*"], folder=tmp_path)
    with serving(settings, config, loaded=False) as server:
        for origin in ("https://any.example", "null"):
            answer = server.http.get("/v1/models", headers=from_page(origin))
            assert answer.status_code == 200 and readable(answer, origin)
        plain = server.http.get("/v1/models", headers={"Sec-Fetch-Site": "cross-site"})
        assert plain.status_code == 200
        wrong = server.http.get("/v1/models", headers={"Host": "evil.example"})
        require_error(wrong, 403, "--allow-host evil.example")


def test_origins_are_as_browsers_name_them() -> None:
    for given, made in (
        (" HTTPS://Example.org/ ", "https://example.org"),
        ("https://example.org:443", "https://example.org"),
        ("http://example.org:8080", "http://example.org:8080"),
        ("http://example.org:80", "http://example.org"),
        ("http://[fd00::1]:3000", "http://[fd00::1]:3000"),
        ("vscode-webview://*", "vscode-webview://*"),
        ("*", "*"),
    ):
        assert origin_of(given) == made
    assert is_let_in("tauri://localhost", ["tauri://*"]) and not is_let_in("tauri://localhost")
    assert is_let_in("https://a.example", ["https://*"])
    assert not is_let_in("http://a.example", ["https://*", "http://b.example"])
    for wrong in ("example.org", "https://example.org/chat", "null", "", "https://*.a.b", "app://"):
        with pytest.raises(SettingError, match="--allow-origin"):
            origin_of(wrong)
    assert host_of(" Host.Docker.Internal") == "host.docker.internal"
    for wrong in ("http://a", "a:8000", "*", "", "a b", "-"):
        with pytest.raises(SettingError, match="--allow-host"):
            host_of(wrong)
