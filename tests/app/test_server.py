"""The app as programs and strangers find it: by HTTP and by gradio's client."""

import errno
import os
import signal
import socket
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from gradio_client import handle_file
from gradio_client.client import Job
from gradio_client.exceptions import AppError

from kvlite.cli.main import main
from kvlite.conversation.library import Library
from kvlite.conversation.record import Record
from kvlite.errors import SettingError
from kvlite_app.serve import _alone, _free_port
from kvlite_app.web.uploading import LARGEST
from tests.app.conftest import Server, client, serving, waited

ROOT = Path(__file__).parents[2]


def http(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.address, timeout=120)


def records(server: Server, user: str = "") -> list[Record]:
    return Library(user, server.data).records()


# What programs may ask.


def test_programs_are_told_of_four_endpoints(server: Server) -> None:
    told = client(server).view_api(return_format="dict")
    assert set(told["named_endpoints"]) == {"/say", "/read", "/conversations", "/memory"}
    assert told["unnamed_endpoints"] == {}


def test_an_answer_streams_and_goes_on_in_its_conversation(server: Server) -> None:
    asks = client(server)
    job = asks.submit("What is a heron?", "", api_name="/say")
    answer = job.result(timeout=180)
    pieces = job.outputs()
    assert len({*pieces}) > 1
    assert all(answer.startswith(each) for each in pieces)
    kept = records(server)[0]
    assert [each.text for each in kept.said] == ["What is a heron?", answer]
    asks.predict("And a stork?", kept.id, api_name="/say")
    told = asks.predict(api_name="/conversations")[0]
    assert (told["id"], told["name"], told["messages"]) == (kept.id, "What is a heron?", 4)


@pytest.mark.long
def test_what_cannot_be_done_is_a_sentence(server: Server, tmp_path: Path) -> None:
    asks, before = client(server), len(records(server))
    for message, id, sentence in (
        ("", "", "the message is empty: say something"),
        ("Hello", "nope", "'nope' is no conversation"),
        ("Hello", "0" * 32, "this conversation was deleted"),
    ):
        with pytest.raises(AppError, match=sentence):
            asks.predict(message, id, api_name="/say")
    for name, content, sentence in (
        ("empty.txt", b" ", "empty.txt"),
        ("broken.pdf", b"%PDF-1.7\nnothing of the kind", "broken.pdf"),
        ("photo.png", b"a,b", "photo.png is not in a format kvlite reads: run OCR"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(AppError, match=sentence) as error:
            asks.predict(handle_file(path), "", api_name="/read")
        assert "/" not in str(error.value).replace("and/or", "")
    with pytest.raises(AppError, match="do not fit this model") as error:
        asks.predict("a" * 5_000_000, "", api_name="/say")
    assert "--" not in str(error.value)
    assert len(records(server)) == before


# What strangers may not.


def test_files_of_this_machine_are_not_read(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("The word is Karsk.")
    paths = ["/etc/passwd", secret, ROOT / "pyproject.toml", server.data]
    paths += [next(server.data.rglob("record.json"), server.data), f"{ROOT}/../{ROOT.name}/app"]
    with http(server) as web:
        for path in paths:
            assert web.get(f"/gradio_api/file={path}").status_code == 404
        for path in ("/monitoring", "/monitoring/summary", "/gradio_api/runs"):
            assert web.get(path).status_code in (403, 404)
        (mine,) = web.post("/gradio_api/upload", files={"files": ("a.txt", b"Hello")}).json()
        assert web.get(f"/gradio_api/file={mine}").status_code == 404  # nor what was uploaded
        before = len(records(server))
        beside = f"{Path(mine).parent}/../{os.path.relpath(secret, Path(mine).parents[1])}"
        for path in (str(secret), beside, f"file://{secret}"):
            for file in (
                path,
                {"path": path},
                {"path": path, "meta": {"_type": "gradio.FileData"}},
            ):
                told = refusal(web, "read", [file, ""])
                assert "was not uploaded" in told or "no file that was uploaded" in told
    assert len(records(server)) == before


def refusal(web: httpx.Client, name: str, data: list[Any]) -> str:
    """What a program is told that speaks for itself, without gradio's client."""
    event = web.post(f"/gradio_api/call/{name}", json={"data": data}).json()["event_id"]
    told = web.get(f"/gradio_api/call/{name}/{event}").text
    assert told.startswith("event: error")
    return told


def test_only_this_machine_s_own_pages_are_answered(server: Server) -> None:
    port = urlsplit(server.address).port
    with http(server) as web:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            answer = web.get("/", headers={"Host": host})
            assert answer.status_code == 200
            own = {"Host": host, "Origin": f"http://{host}"}
            files = {"files": ("a.txt", b"Hello")}
            assert web.post("/gradio_api/upload", files=files, headers=own).status_code == 200
            for origin in ("http://example.org", "null", f"http://localhost:{port + 1}"):
                foreign = own | {"Origin": origin}
                sent = web.post("/gradio_api/upload", files=files, headers=foreign)
                assert sent.status_code == 403
        assert web.get("/", headers={"Host": "example.org"}).status_code == 400
        assert web.get("/config", headers={"Host": f"evil.org:{port}"}).status_code == 400
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "http" not in policy


@pytest.mark.long
def test_too_much_is_refused_before_all_of_it_came(server: Server) -> None:
    sent = 0

    def much() -> Iterator[bytes]:
        nonlocal sent
        yield (
            b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n'
            b"Content-Type: text/plain\r\n\r\n"
        )
        while sent < 1 << 30:
            sent += 1 << 20
            yield bytes(1 << 20)
        yield b"\r\n--x--\r\n"

    with http(server) as web:
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        try:
            answer = web.post("/gradio_api/upload", content=much(), headers=kind)
        except httpx.TransportError:
            assert LARGEST < sent < 1 << 30  # it hung up
        else:
            assert answer.status_code == 413
            assert str(LARGEST) in answer.text
        assert web.get("/").status_code == 200


# Who logs in.

USERS = ("--auth", "ann:secret", "--auth", "ben:other")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, talker: Path) -> Iterator[Server]:
    """One that asks for passwords, and answers at length."""
    data = tmp_path_factory.mktemp("locked")
    with serving(data, "--model", str(talker), "--max-tokens", "50000", *USERS) as server:
        yield server


@pytest.mark.long
def test_nothing_is_told_without_a_password(locked: Server) -> None:
    with http(locked) as web:
        for path in ("/config", "/gradio_api/info", "/gradio_api/queue/data?session_hash=a"):
            assert web.get(path).status_code == 401, path
        files = {"files": ("a.txt", b"Hello")}
        assert web.post("/gradio_api/upload", files=files).status_code == 401
        for path in ("queue/join", "run/conversations", "call/say", "run/memory"):
            body = {"data": [None], "fn_index": 0, "session_hash": "a"}
            assert web.post(f"/gradio_api/{path}", json=body).status_code == 401, path
        page = web.get("/")
        assert "Hello" not in page.text
        assert "elem_id" not in page.text  # no component of the page
        wrong = web.post("/login", data={"username": "ann", "password": "other"})
        assert wrong.status_code == 400


@pytest.mark.long
def test_users_are_kept_apart(locked: Server, talker: Path) -> None:
    ann, ben = (client(locked, auth=("ann", "secret")), client(locked, auth=("ben", "other")))
    job = ann.submit("Where is the treasure?", "", api_name="/say")
    waited(lambda: job.outputs() and len(job.outputs()[-1]) > 20)
    (kept,) = ann.predict(api_name="/conversations")
    assert kept["name"] == "Where is the treasure?"
    assert ben.predict(api_name="/conversations") == []

    with pytest.raises(AppError, match="was deleted"):
        ben.predict("Tell me", kept["id"], api_name="/say")
    with pytest.raises(AppError, match="was deleted"):
        ben.predict(handle_file(ROOT / "README.md"), kept["id"], api_name="/read")
    with pytest.raises(AppError, match="an answer is on its way"):
        ann.predict("Tell me", kept["id"], api_name="/say")
    assert ben.predict(api_name="/conversations") == []

    # Ben waits his turn; what stands beside his conversation tells nothing of hers.
    second = ben.submit("Hello", "", api_name="/say")
    waited(lambda: len(records(locked, "ben")) == 1)
    hers, his = panel(locked, "ann", "secret"), panel(locked, "ben", "other")
    assert 'data-figure="seen"' in hers
    assert "entries a head" in hers
    assert "another user's conversation" in unescape(his)
    for word in ("data-figure", "entries", "tokens", "treasure", kept["id"]):
        assert word not in his

    job.cancel()
    waited(lambda: second.outputs() and len(second.outputs()[-1]) > 20)
    second.cancel()
    waited(lambda: len(records(locked, "ben")[0].said) == 2)
    (first,) = records(locked, "ann")
    assert [each.role for each in first.said] == ["user", "assistant"]
    assert records(locked, "ben")[0].said[0].text == "Hello"
    assert locked.end(signal.SIGTERM) == 0
    assert Library("ben", locked.data).whole(records(locked, "ben")[0].id).is_file()
    assert Library("ann", locked.data).whole(first.id).is_file()


def panel(server: Server, name: str, password: str) -> str:
    """What stands beside the conversation, as the page asks for it."""
    with http(server) as web:
        web.post("/login", data={"username": name, "password": password}).raise_for_status()
        events = web.get("/config").json()["dependencies"]
        (beat,) = (each for each in events if any(how == "tick" for _, how in each["targets"]))
        body = {"data": [None], "fn_index": beat["id"], "session_hash": name}
        answer = web.post(f"/gradio_api/run/{beat['api_name']}", json=body).raise_for_status()
        return str(answer.json()["data"][0])


@pytest.mark.parametrize(
    "args", [["--host", "0.0.0.0"], ["--share"], ["--host", "::", "--share"], ["--auth", "hunter2"]]
)
def test_without_a_password_nobody_else_is_let_in(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvlite", "app", *args])
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("kvlite: ")
    assert err.count("\n") == 1
    assert "NAME:PASSWORD" in err
    assert "hunter2" not in err


def test_another_app_with_the_same_conversations_is_refused(server: Server) -> None:
    told = f"another `kvlite app` has .* in {server.data}/app"
    with pytest.raises(SettingError, match=told), _alone(server.data):
        pass


def test_a_folder_that_cannot_be_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("fcntl.flock", flock)
    told = f"{tmp_path}/app cannot be locked .*KVLITE_DATA"
    with pytest.raises(SettingError, match=told), _alone(tmp_path):
        pass


# How it ends.


@pytest.mark.long
def test_whatever_ends_it_loses_the_unfinished_answer_at_most(tmp_path: Path, talker: Path) -> None:
    with serving(tmp_path, "--model", str(talker), "--max-tokens", "50000") as server:
        asks = client(server)
        first = asks.submit("Hello", "", api_name="/say")
        waited(lambda: first.outputs() and len(first.outputs()[-1]) > 20)
        first.cancel()
        waited(lambda: len(records(server)[0].said) == 2)
        (kept,) = records(server)
        seconds = list[Job]()

        def goes_on() -> bool:
            """What was cancelled is on disk a moment before it has ended."""
            if not seconds or seconds[-1].done():
                seconds.append(asks.submit("And the rest?", kept.id, api_name="/say"))
            return any(len(each) > 20 for each in seconds[-1].outputs())

        waited(goes_on)
        server.end(signal.SIGKILL)
    assert records(server)[0].said == kept.said

    with serving(tmp_path, "--model", str(talker), "--max-tokens", "50000") as server:
        asks = client(server)
        assert records(server)[0].draft == "And the rest?"
        jobs = [asks.submit("And the rest?", kept.id, api_name="/say")]
        waited(lambda: jobs[0].outputs() and len(jobs[0].outputs()[-1]) > 20)
        jobs.append(asks.submit("Hello there", "", api_name="/say"))
        waited(lambda: len(records(server)) == 2)
        assert server.end(signal.SIGINT) == 0
    ended = Library("", tmp_path).record(kept.id)
    assert ended.said[:2] == kept.said
    assert [each.role for each in ended.said[2:]] == ["user", "assistant"]
    assert len(ended.said[3].text) > 20
    assert Library("", tmp_path).whole(kept.id).is_file()
    (other,) = (each for each in records(server) if each.id != kept.id)
    assert (other.draft, other.said) == ("Hello there", [])


def test_a_port_that_is_taken_is_passed_over(server: Server) -> None:
    port = urlsplit(server.address).port
    assert port is not None
    assert port < _free_port("127.0.0.1", port) < port + 100
    with socket.socket() as last, pytest.raises(SettingError, match="no port from 65535"):
        last.bind(("127.0.0.1", 65535))
        last.listen()
        _free_port("127.0.0.1", 65535)
