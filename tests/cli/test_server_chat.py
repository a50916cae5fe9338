"""`--server`: ask and chat let a server answer, without a model or torch of their own."""

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input

from kvlite.config.settings import Settings
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.server.config import ServerConfig
from tests.cli.conftest import Run
from tests.foreign import Foreign
from tests.server.conftest import Server, serving

PROBE = (
    "import sys; from kvlite.cli.main import main\n"
    "try: main()\n"
    "except SystemExit as ended: print(ended.code, {'torch', 'transformers'} & {*sys.modules})"
)


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = ServerConfig(folder=tmp_path_factory.mktemp("server"), keys=["secret"])
    with serving(Settings(model=str(tiny_folder), max_new_tokens=8), config) as found:
        yield found


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLITE_API_KEY", "secret")


def test_answers_are_those_of_the_model_here(
    server: Server, kvlite: Run, text: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = kvlite("ask", text, "Who sat?", "--model", tiny_folder, "--max-tokens", 8, "--json")
    served = ("--server", server.address, "--max-tokens", 8)
    there = kvlite("ask", text, "Who sat?", *served, "--json").json()
    assert there["answer"] == here.json()["answer"] and there["finish_reason"] == "length"
    assert there["model"] == "tiny" and there["usage"]["completion_tokens"] == 8
    monkeypatch.setenv("KVLITE_SERVER", server.address.removeprefix("http://"))
    again = kvlite("ask", text, "Who sat?", "Where?", "--max-tokens", 8, "--method", "full")
    assert again.code == 0 and again.out.startswith(f"{there['answer']}\n")
    assert "of them known, 8 generated" in again.err
    odd = kvlite("ask", text, "Who \udcff sat?", "--system", "a\udcff")
    assert odd.code == 0 and odd.out.strip()
    schema = '{"enum": ["red", "green"]}'
    held = kvlite("ask", text, "Which?", "--schema", schema, "--json").json()
    assert json.loads(held["answer"]) in ("red", "green")


def test_a_chat_goes_on_with_its_documents(
    server: Server, kvlite: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Who sat?\n\nAnd then?\n"))
    done = kvlite("chat", text, "--server", server.address, "--json")
    first, second = map(json.loads, done.out.splitlines())
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + 8
    assert second["usage"]["kvlite"]["prompt_tokens"] < 60 and done.code == 0


def test_at_a_terminal_it_goes_back(
    foreign: Foreign, kvlite: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("screen", "chat.command"):
        monkeypatch.setattr(f"kvlite.cli.{module}.at_terminal", lambda: True)
    typed = (
        *("/undo", "/quit", "One", "/edit 2", "Two", "/edit", " more", "/undo", "/undo 1", "Three"),
        *("/edit 1", "", "/undo", "/undo", "Four"),
    )
    with create_pipe_input() as keyboard, create_app_session(input=keyboard):
        keyboard.send_text("".join(f"{line}\r" for line in typed) + "\x04")
        done = kvlite("chat", text, "--server", foreign.url)
    assert done.code == 0
    said = [[each["content"] for each in body["messages"]] for body in foreign.asked]
    one = said[0][0]
    assert one.endswith("One") and "The cat sat" in one
    heard = "odd/one heard"
    assert said == [
        [one],
        [one, f"{heard} 1: One", "Two"],
        [one, f"{heard} 1: One", "Two more"],
        [one, f"{heard} 1: One", "Three"],
        [one.replace("One", "Four")],
    ]
    told = " ".join(done.err.split())
    assert told.count("kvlite: ") == 4 and "kvlite: nothing has been said yet" in told
    for wrong in ("command /quit", "message 2", "command /undo 1"):
        assert f"kvlite: there is no {wrong}" in told
    assert done.err.count("Nothing was changed") == 1


def test_nothing_of_torch_is_imported(server: Server, text: Path) -> None:
    flags = "--server", server.address, "--max-tokens", "3"
    command = [sys.executable, "-c", PROBE, "ask", str(text), "Who sat?", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.splitlines()[-1] == "None set()", done.stderr


class Odd(BaseHTTPRequestHandler):
    """Answers what no server should."""

    said: Any = b""
    status = 200
    headers_of: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "odd"}]}' if self.said else b"<html>")

    def do_POST(self) -> None:
        self.headers_of.append(self.headers)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *args: Any) -> None: ...


def test_what_goes_wrong_is_one_sentence(
    server: Server, kvlite: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, command: Sequence[object] = ("ask", text, "Who?")) -> str:
        done = kvlite(*command, *args)
        assert done.code == 2 and done.err.count("kvlite: ") == 1 and "Traceback" not in done.err
        return " ".join(done.err.split())

    def serves(*given: object, **options: object) -> None:
        raise AssertionError("it was not refused")

    monkeypatch.setattr("kvlite_app.serve.serve", serves)
    for command in (["ask", text, "Who?"], ["chat"], ["app"]):
        assert "cannot be reached" in refused("--server", "http://127.0.0.1:9", command=command)
        assert "begin it with http://" in refused("--server", "ftp://a", command=command)
        assert "is no address" in refused("--server", "http://a:b", command=command)
    secret = refused("--server", "http://ann:hidden@127.0.0.1:9/v1?key=hidden")
    assert "http://127.0.0.1:9/v1 cannot" in secret and "hidden" not in secret
    lent = ("--server", server.address, "--api-port", 9)
    assert "leave it out, or --server (KVLITE_SERVER)" in refused(*lent, command=["app"])
    assert "no model 'x'" in refused("--server", server.address, "--model", "x")
    for flags in (
        ["--vram", "2GiB"],
        ["--stream", "disk"],
        ["--chunk", "64"],
        ["--scores", "host"],
    ):
        told = refused("--server", server.address, *flags)
        assert f"{flags[0]} would be ignored, since the model is not here: leave" in told
    assert "--device would be" in refused("--server", "x", "--device", "cpu", command=["app"])
    assert "not a grammar" in refused("--server", server.address, "--schema", 'start: "a"')
    with HTTPServer(("127.0.0.1", 0), Odd) as odd:
        threading.Thread(target=odd.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{odd.server_port}"
        told = refused("--server", address, "--kv-bits", "8", "--budget", "64")
        assert "--budget and --kv-bits would be ignored, since the server is not kvlite's" in told
        assert "it has no /models" in refused("--server", address)
        assert "it has no /models" in refused("--server", address, command=["app"])
        for said in (
            *(b"data: {\n\n", b'data: {"choices": [5]}\n\n', b'data: {"error": 5}\n\n'),
            *(b'data: {"usage": 5}\n\n', b'data: {"choices": {"a": 5}}\n\n'),
            b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
        ):
            monkeypatch.setattr(Odd, "said", said)
            assert "it sends no OpenAI chunks" in refused("--server", address)
        for error in (b'"overloaded"', b'{"message": "overloaded"}'):
            monkeypatch.setattr(Odd, "said", b'data: {"error": %b}\n\n' % error)
            assert f"{address} did not answer: overloaded" in refused("--server", address)
        odd.shutdown()
    monkeypatch.setenv("KVLITE_API_KEY", "schlüssel")
    assert "other characters than ASCII's" in refused("--server", server.address)
    monkeypatch.setenv("KVLITE_API_KEY", "wrong")
    assert "give a key of this server" in refused("--server", server.address)
    assert "give a key of this server" in refused("--server", server.address, command=["app"])
    saved = kvlite("ask", text.with_suffix(".kv"), "Who?", "--server", server.address)
    assert saved.code == 2 and "leave --server out" in saved.err


def test_servers_that_know_little_of_http_are_heard(
    kvlite: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVLITE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_ORG_ID", "ours")  # which is no other server's business
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway: ours")
    monkeypatch.setattr(Odd, "headers_of", [])
    with HTTPServer(("127.0.0.1", 0), Odd) as odd:
        threading.Thread(target=odd.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{odd.server_port}"
        chunk = b'data: {"choices": [{"delta": {"content": "%s"}}]}'
        for end in (b"\n", b"\r\n", b"\r\r", b"\n\n: comment\n\n"):
            monkeypatch.setattr(Odd, "said", end.join((chunk % b"One", chunk % b" two")))
            done = kvlite("ask", text, "Who?", "--server", address)
            assert (done.code, done.out) == (0, "One two\n"), done.err
        monkeypatch.setattr(Odd, "said", chunk % b"caf\xc3")  # half a character
        assert kvlite("ask", text, "Who?", "--server", address).out == "caf\ufffd\n"
        for status, said, told in (
            (502, b"<html><b>Bad gateway</b></html>", "HTTP 502"),
            (422, b'{"detail": "no such field"}', "HTTP 422"),
            (500, b'{"error": "out of memory"}', "out of memory"),
            (404, b'{"error": {"message": "no such model"}}', "no such model"),
        ):
            monkeypatch.setattr(Odd, "status", status)
            monkeypatch.setattr(Odd, "said", said)
            done = kvlite("ask", text, "Who?", "--server", address)
            assert done.code == 2 and f"{address} did not answer: {told}" in done.err
        odd.shutdown()
    for headers in Odd.headers_of:
        ours = {"authorization", "openai-organization", "x-gateway"}
        assert not ours & {each.lower() for each in headers}


def test_text_comes_as_it_is_sent_though_no_empty_lines_are() -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "%s"}}]}\n'
    heard = threading.Event()

    class Slow(Odd):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(chunk % b"One")
            assert heard.wait(20)
            self.wfile.write(chunk % b" two")

    from kvlite.web.openai_client import OpenAIClient

    with HTTPServer(("127.0.0.1", 0), Slow) as slow:
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        client = OpenAIClient(f"http://127.0.0.1:{slow.server_port}")
        answer = client.answer({"model": "slow"}, [], NO_CALLBACKS)
        assert next(answer).text == "One"
        heard.set()
        assert [each.text for each in answer][-1] == "One two"
        slow.shutdown()


def test_ctrl_c_ends_it_while_a_name_is_looked_up(text: Path) -> None:
    """A lookup is one call of the system's, which nothing ends."""
    code = """
import hashlib, os, signal, socket, threading, time
def lookup(*_, **__):
    threading.Timer(0.3, interrupt).start()
    hashlib.pbkdf2_hmac("sha512", b"", b"", 60_000_000)
def interrupt():
    threading.Timer(5, os._exit, [99]).start()
    os.kill(os.getpid(), signal.SIGINT)
socket.getaddrinfo = lookup
from kvlite.__main__ import main
main()
"""
    command = [sys.executable, "-c", code, "ask", str(text), "Who?", "--server", "http://far"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
