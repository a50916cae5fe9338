"""`kvlite serve` as people start and end it."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from kvlite.config.settings import Settings
from tests.cli.conftest import Refused, Run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.mark.long
def test_it_serves_until_it_is_interrupted(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path))
    port = free_port()
    command = [sys.executable, "-m", "kvlite", "serve", str(tiny_folder), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == f"Loading tiny for http://127.0.0.1:{port}/v1 (Ctrl-C ends it)\n"
        said = process.stderr.readline()
        assert said == f"kvlite serves tiny at http://127.0.0.1:{port}/v1\n"
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        body = {"messages": [{"role": "user", "content": "heron " * 300}], "max_tokens": 3}
        address = f"http://127.0.0.1:{port}/v1/chat/completions"
        made = httpx.post(address, json=body, timeout=300)
        assert made.json()["usage"]["completion_tokens"] == 3
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0 and time.monotonic() - begun < 60
        rest = process.stderr.read()
    assert "a new conversation of" in rest and "heron" not in rest and "Traceback" not in rest


@pytest.mark.parametrize(
    ("args", "planned", "longest"),
    [
        ((), 2048, None),
        (("--max-tokens", 300), 300, 300),
        (("--max-tokens", 9000), 2048, 9000),
        (("--reserve-tokens", 500), 500, None),
    ],
)
def test_answers_end_where_the_model_ends_them(
    kvlite: Run,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
    planned: int,
    longest: int | None,
) -> None:
    """Memory is planned for less."""
    served: list[Settings] = []
    monkeypatch.setattr(
        "kvlite.server.serve.serve", lambda settings, config, tell: served.append(settings)
    )
    assert kvlite("serve", tiny_folder, *args).code == 0
    assert (served[0].planned_tokens, served[0].max_new_tokens) == (planned, longest)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 lets others in"),
        (("--api-key", " "), "--api-key is empty"),
        (("--keep", "lots"), "--keep 'lots' is not a size"),
        (("--keep-disk", "auto"), "--keep-disk has no auto"),
        (("--port", "0"), "port"),
        (("--allow-origin", "example.org/chat"), "--allow-origin 'example.org/chat' is no origin"),
        (("--allow-host", "http://a"), "--allow-host 'http://a' is no host"),
        (("--host", "0.0.0.0", "--api-key", "k", "--allow-host", "a"), "called by any name"),
        (("/no/such/folder",), "/no/such/folder"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    refused: Refused, args: tuple[str, ...], words: str
) -> None:
    refused(["serve", *args], words)


def test_an_api_beside_the_app_needs_its_port_and_key(refused: Refused) -> None:
    refused(["app", "--api-key", "secret"], "--api-key is for programs: give --api-port")
    others = ["app", "--host", "0.0.0.0", "--auth", "ann:secret", "--api-port", "8000"]
    refused(others, "--host 0.0.0.0 lets others in: give --api-key")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        refused(["app", "--api-port", port], f"--api-port {port} cannot be served on")


def test_a_port_that_is_taken_is_said(kvlite: Run, tiny_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        done = kvlite("serve", tiny_folder, "--port", port)
    assert done.code == 2 and f"--port {port} cannot be served on" in done.err
