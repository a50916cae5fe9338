"""A server that is killed, by kill -9, and started again: what is lost, and what is not."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attack.process import PATIENCE, served, until
from tests.cli.conftest import model_of
from tests.cli.test_serve import free_port
from tests.server.conftest import said
from tests.server.test_chat import expected

CHAT, BIRDS = "/v1/chat/completions", ("Herons", "Storks", "Egrets")


def first(bird: str) -> str:
    """A message of some 1,500 tokens."""
    return f"{bird} stand in the water. " * 250


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
    kept, uploads = data / "library", data / "server" / "files"
    data.mkdir()
    second = dict[str, list[Any]]()
    with (
        ThreadPoolExecutor() as clients,
        served(model, data, port=port) as server,
        server.http as http,
    ):
        file = http.post("/v1/files", files={"file": ("birds.txt", b"Rails are shy.")}).json()["id"]
        counts = [0, 0]
        open_requests = [clients.submit(keep_asking, http, counts, at) for at in range(2)]
        for bird in BIRDS:
            answer, _ = asked(http, said(first(bird)))
            second[bird] = said(first(bird), answer, "Where?")
        assert until(lambda: len([*kept.rglob("*.kv")]) == len(BIRDS))
        before = sum(counts)
        assert until(lambda: sum(counts) > before + 1)
        server.kill()
        for each in open_requests:  # they learn of it
            assert isinstance(each.exception(PATIENCE), httpx.TransportError)
    unfinished = f".one.{server.process.pid}-0123abcd.part.txt"
    left = [folder / unfinished for folder in (uploads, next(kept.glob("*/whole.kv")).parent)]
    for each in left:
        each.write_text("It was being written.")
    with served(model, data, port=port) as server, server.http as http:
        assert http.get(f"/v1/files/{file}/content").text == "Rails are shy."
        for bird in BIRDS:
            answer, read = asked(http, second[bird])
            assert read < 100 and answer == expected(reference, second[bird])
        assert not any(each.exists() for each in left)
        assert [each["id"] for each in http.get("/v1/files").json()["data"]] == [file]
    log = server.log.read_text()
    assert "Traceback" not in log and "is not gone on with" not in log
