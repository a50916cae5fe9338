"""A server that is killed, by kill -9, and started again: what is lost, and what is not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import model_of
from tests.cli.test_serve import free_port
from tests.server.conftest import said
from tests.server.test_chat import expected

# A machine that does other things is slow; alone, nothing here takes ten seconds.
PATIENCE = 240
CHAT, BIRDS = "/v1/chat/completions", ("Herons", "Storks", "Egrets")


def first(bird: str) -> str:
    """A message of some 1,500 tokens."""
    return f"{bird} stand in the water. " * 250


@contextmanager
def started(model: Path, data: Path, port: int) -> Iterator[tuple[httpx.Client, Callable[[], int]]]:
    """A server in a process of its own that is loaded, and what kills it and tells its number."""
    args = ("serve", str(model), "--port", str(port), "--method", "full")
    command = [sys.executable, "-m", "kvlite", *args]
    given = os.environ | {"KVLITE_DATA": str(data), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (
        (data / "log").open("ab") as log,
        subprocess.Popen(command, env=given, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http,
    ):

        def kill() -> int:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
            return process.pid

        try:
            until(lambda: process.poll() is not None or is_up(http))
            assert process.poll() is None, (data / "log").read_text()
            yield http, kill
        finally:
            kill()


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


def is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def asked(http: httpx.Client, messages: list[Any]) -> tuple[str, int]:
    """An answer, and how many tokens were read for it."""
    made = http.post(CHAT, json={"messages": messages, "max_tokens": 8}).json()
    return made["choices"][0]["message"]["content"], made["usage"]["kvlite"]["prompt_tokens"]


def keep_asking(http: httpx.Client, counts: list[int], number: int) -> None:
    """Ask and ask again, for answers that are long."""
    body = {"messages": said(f"Go on, {number}."), "max_tokens": 500, "stream": True}
    while True:
        with http.stream("POST", CHAT, json=body) as response:
            for line in response.iter_lines():
                counts[number] += line.startswith("data: {")


@pytest.mark.long
def test_what_was_answered_outlives_kill_9_under_load(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "model").mkdir()
    model, port = model_of(tmp_path / "model", 8192), free_port()
    reference = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    data = tmp_path / "data"
    kept, uploads = data / "server" / str(port), data / "server" / "files"
    data.mkdir()
    second = dict[str, list[Any]]()
    with ThreadPoolExecutor() as clients, started(model, data, port) as (http, kill):
        file = http.post("/v1/files", files={"file": ("birds.txt", b"Rails are shy.")}).json()["id"]
        counts = [0, 0]
        open_requests = [clients.submit(keep_asking, http, counts, at) for at in range(2)]
        for bird in BIRDS:
            answer, _ = asked(http, said(first(bird)))
            second[bird] = said(first(bird), answer, "Where?")
        until(lambda: len([*kept.rglob("*.kv")]) == len(BIRDS))
        before = sum(counts)
        until(lambda: sum(counts) > before + 1)
        number = kill()
        for each in open_requests:  # they learn of it
            assert isinstance(each.exception(PATIENCE), httpx.TransportError)
    unfinished = f".one.{number}-0123abcd.part.txt"
    left = [folder / unfinished for folder in (uploads, next(kept.iterdir()))]
    for each in left:
        each.write_text("It was being written.")
    with started(model, data, port) as (http, _):
        assert http.get(f"/v1/files/{file}/content").text == "Rails are shy."
        for bird in BIRDS:
            answer, read = asked(http, second[bird])
            assert read < 100 and answer == expected(reference, second[bird])
        assert not any(each.exists() for each in left)
        assert [each["id"] for each in http.get("/v1/files").json()["data"]] == [file]
    log = (data / "log").read_text()
    assert "Traceback" not in log and "is not gone on with" not in log
