"""Whatever is sent by HTTP is answered: in a sentence, soon, and without a traceback."""

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.middleware import Middleware
from starlette.testclient import TestClient

from kvlite.config.settings import Settings
from kvlite_app.engine.service import Service
from kvlite_app.form import Models
from kvlite_app.page import make_page
from kvlite_app.serve import _free_port
from kvlite_app.web.guard import ServerConfig
from kvlite_app.web.uploading import Uploading

pytestmark = pytest.mark.long
MANY = settings(
    max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
API = "/gradio_api"
JSON = {"content-type": "application/json"}
GETS = (
    *("/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt", "/logout"),
    *(f"{API}/{each}" for each in ("info", "app_id", "user", "login_check", "queue/status")),
    *(f"{API}/{each}" for each in ("startup-events", "upload", "queue/join", "run/say")),
    *("/static/{0}", "/assets/{0}", "/svelte/{0}", f"{API}/file={{0}}", f"{API}/{{0}}", "/{0}"),
    *(f"{API}/upload_progress", f"{API}/call/{{0}}", f"{API}/stream/{{0}}/close"),
)
POSTS = (
    *(f"{API}/{each}" for each in ("queue/join", "cancel", "reset", "upload", "component_server")),
    *(
        f"{API}/{way}/{name}"
        for way in ("run", "api", "call", "call/v2")
        for name in ("say", "{0}")
    ),
    *(f"{API}/run/{each}" for each in ("read", "conversations", "memory")),
    "/login",
    "/logout",
    "/config",
)
SECONDS, BYTES = 60, 1 << 30
texts = st.text(max_size=40) | st.sampled_from(
    ["..", "../../etc/passwd", "\0", "\ud800", "\u202e", "/" * 500, "a" * 3000, "%00", "http://x"]
)
numbers = st.integers() | st.floats() | st.sampled_from([2**63, -(2**63), 10**400, 1e308, -1, 0])
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)
NAMES = ("data", "fn_index", "session_hash", "event_id", "event_data", "trigger_id", "batched")
known = st.dictionaries(
    st.sampled_from((*NAMES, "simple_format", "message", "conversation", "file", "path", "meta")),
    plain | st.integers(0, 60) | st.just([]),
    max_size=8,
)
deep = st.integers(1, 200_000).map(lambda times: b'{"data":' + b"[" * times + b"]" * times + b"}")
bodies = st.one_of(
    known.map(lambda each: json.dumps(each).encode()),
    plain.map(lambda each: json.dumps(each).encode()),
    deep,
    st.binary(max_size=300),
    st.just(b"[" + b"1," * 100_000 + b"1]"),
    known.map(lambda each: json.dumps(each).encode()[:-3]),
)
kinds = st.sampled_from(
    [
        *("application/json", "text/plain", "multipart/form-data", "", "application/json; charset"),
        *("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a" * 2000),
    ]
)
header_texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)
HEADERS = (
    "Range",
    "Cookie",
    "Origin",
    "Referer",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "Accept",
)
headers = st.dictionaries(
    st.sampled_from((*HEADERS, "X-Forwarded-For", "Content-Length", "Accept-Encoding", "Host")),
    header_texts
    | st.sampled_from(["http://testserver", "testserver", "-1", "9" * 30, "bytes=9-1"]),
    max_size=3,
)
file_names = texts | st.sampled_from(
    ["a.pdf", "../a.txt", "..", ".", "CON", "a/../b.txt", "é" * 300]
)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The app as it is served, without a model."""
    root = tmp_path_factory.mktemp("fuzz")
    service = Service(Settings(model=str(root / "none")), root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(service.uploads.folder))
        for waits in ("_FIRST", "_MOST_ADDRESS", "_MOST_NAME"):  # after wrong passwords
            patch.setattr(f"kvlite_app.web.logins.{waits}", 0.0)
        page = make_page(service, Models())
        page.queue(max_size=64)
        server_config = ServerConfig(auth=[("ann", "secret")])
        guards = [*server_config.middleware(), Middleware(Uploading, uploads=service.uploads)]
        app: Any
        app, _, _ = page.launch(
            auth=[("ann", "secret")],
            server_port=_free_port("127.0.0.1", 21_000),
            prevent_thread_lock=True,
            quiet=True,
            show_error=True,
            _frontend=False,
            app_kwargs={"middleware": guards},
        )
        client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
        app.tokens["token"] = "ann"
        client.cookies.set(f"access-token-{app.cookie_id}", "token")
        yield client
        page.close(verbose=False)
    service.close()


def asks(web: TestClient, method: str, path: str, **sent: Any) -> None:
    """Ask, and look at what comes, how soon, and what it takes."""
    before, begun = psutil.Process().memory_info().rss, time.monotonic()
    answer = web.request(method, f"http://127.0.0.1{path}", **sent)
    took = time.monotonic() - begun
    assert took < SECONDS, (method, path, sent)
    assert psutil.Process().memory_info().rss < before + BYTES
    assert "Traceback" not in answer.text
    if answer.status_code >= 500 and answer.status_code not in (503, 507):
        # A handler's own refusal, as gradio has it, and in words.
        words = answer.text.startswith('{"error"') or "Something" in answer.text
        assert words, (method, path, answer.status_code, answer.text[:300])


@pytest.fixture(autouse=True)
def no_traceback(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is printed as programmers read it."""
    yield
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err, (out + err)[-6000:]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/gradio_api/call/v2/say", {}, 500, "load the page again"),
        (
            "/gradio_api/queue/join",
            {"data": [], "fn_index": [], "session_hash": [], "event_id": {"\ud800": None}},
            400,
            "half a character",
        ),
    ],
)
def test_what_gradio_stumbles_over_is_answered_in_a_sentence(
    web: TestClient, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    answer = web.post(f"http://127.0.0.1{path}", content=json.dumps(body), headers=JSON)
    assert answer.status_code == status and said in answer.text


@MANY
@given(st.sampled_from(GETS), texts, headers, st.dictionaries(texts, texts, max_size=3))
def test_paths_and_headers(
    web: TestClient, path: str, name: str, given: dict[str, str], query: dict[str, str]
) -> None:
    method = "GET" if len(name) % 5 else "HEAD"
    sent = {each: value for each, value in query.items() if _is_whole(each + value)}
    asks(web, method, path.format(_path(name)), headers=given, params=sent)


@MANY
@given(st.sampled_from(POSTS), texts, bodies, kinds, headers)
def test_bodies(
    web: TestClient, path: str, name: str, body: bytes, kind: str, given: dict[str, str]
) -> None:
    given = {each: value for each, value in given.items() if each != "Cookie"}
    asks(
        web, "POST", path.format(_path(name)), content=body, headers=given | {"Content-Type": kind}
    )


@MANY
@given(st.sampled_from(("join", "run")), st.integers(0, 60), st.lists(plain, max_size=8), known)
def test_events(
    web: TestClient, way: str, number: int, data: list[Any], more: dict[str, Any]
) -> None:
    body = more | {"data": data, "fn_index": number, "session_hash": "tab"}
    path = f"{API}/queue/join" if way == "join" else f"{API}/run/predict"
    asks(web, "POST", path, content=json.dumps(body).encode(), headers=JSON)


@MANY
@given(
    st.lists(st.tuples(file_names, st.binary(max_size=200), texts), max_size=5),
    st.binary(max_size=300),
    st.sampled_from([None, "multipart/form-data", "multipart/form-data; boundary=x"]),
    texts,
)
def test_uploads(
    web: TestClient, files: list[tuple[str, bytes, str]], body: bytes, kind: str | None, id: str
) -> None:
    query = {"upload_id": id} if id and _is_whole(id) else {}
    if kind is not None:
        asks(
            web, "POST", f"{API}/upload", content=body, headers={"Content-Type": kind}, params=query
        )
        return
    form = b""
    for name, content, field in files:
        about = f'form-data; name="{field}"; filename="{name}"'.encode("utf-8", "replace")
        form += b"--x\r\nContent-Disposition: " + about + b"\r\n\r\n" + content + b"\r\n"
    given = {"Content-Type": "multipart/form-data; boundary=x"}
    asks(web, "POST", f"{API}/upload", content=form + b"--x--\r\n", headers=given, params=query)


def _path(name: str) -> str:
    return quote(name, safe="/%:", errors="replace")


def _is_whole(text: str) -> bool:
    return text.encode("utf-8", "replace").decode() == text
