"""Requests name the models of this machine: one is loaded at a time, in place of the other."""

import gc
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlite.config.settings import EMBEDDED_MODEL, Settings
from kvlite.server.config import ServerConfig, names_of
from kvlite.server.models import is_alike
from tests.server.conftest import Server, said, serving
from tests.server.test_chat import expected
from tests.server.test_refusing import require_error

CHAT, OTHER, BIG, BROKEN = "/v1/chat/completions", "~/models/other", "~/models/big", "~/models/bad"


@pytest.fixture(scope="module")
def home(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user with a model of other weights than the tiny one, one that is too large, and one that
    cannot be run."""
    home = tmp_path_factory.mktemp("home")
    for name in ("other", "big", "bad"):
        shutil.copytree(tiny_folder, home / "models" / name)
    torch.manual_seed(7)
    other = AutoModelForCausalLM.from_pretrained(tiny_folder)
    for weights in other.parameters():
        weights.data += 0.1 * torch.randn_like(weights)
    other.save_pretrained(home / "models" / "other")
    config = json.loads((tiny_folder / "config.json").read_bytes())
    large = {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 64}
    (home / "models" / "big" / "config.json").write_text(json.dumps(config | large))
    (home / "models" / "bad" / "model.safetensors").unlink()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "USERPROFILE"):
            patch.setenv(name, str(home))
        patch.setenv("KVLITE_MODELS", str(home / "models"))
        patch.setenv("KVLITE_CACHE", str(home / "cache"))
        patch.delenv("OLLAMA_MODELS", raising=False)
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
        patch.setattr("kvlite.server.kept.SHORT", 100)
        yield home


@pytest.fixture(scope="module")
def several(home: Path, settings: Settings) -> Iterator[Server]:
    config = ServerConfig(folder=home / "served")
    with serving(settings.replace({"vram": "96MiB"}), config) as found:
        yield found


def asked(server: Server, model: str | None, *texts: str, **given: Any) -> httpx.Response:
    body = {"model": model, "messages": said(*texts), **given}
    return server.http.post(CHAT, json=body)


def statuses(server: Server) -> dict[str, str]:
    listed = server.http.get("/v1/models").json()["data"]
    return {each["id"]: each["status"]["value"] for each in listed}


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_model_that_is_named_is_loaded_in_place_of_the_other(several: Server, home: Path) -> None:
    others = {OTHER: "unloaded", BIG: "unloaded", EMBEDDED_MODEL: "unloaded"}
    assert statuses(several) == {"tiny": "loaded", **others}
    document = "Herons stand in the water. " * 30
    first = asked(several, "tiny", document, max_tokens=6).json()
    folder = home / "models" / "other"
    reference = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    made = asked(several, OTHER, document).json()
    assert made["choices"][0]["message"]["content"] == expected(reference, said(document))
    assert made["choices"][0]["message"]["content"] != first["choices"][0]["message"]["content"]
    assert made["model"] == OTHER and not made["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert statuses(several) == {"tiny": "unloaded", **others, OTHER: "loaded"}
    assert several.http.get(f"/v1/models/{OTHER}").json()["max_model_len"] == 1024
    # Nobody reads the document twice: it was on disk meanwhile.
    answer = first["choices"][0]["message"]["content"]
    again = asked(several, "tiny", document, answer, "Which?").json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
    assert statuses(several)["tiny"] == "loaded"


def test_what_is_loaded_stays_while_it_answers_or_where_another_cannot_fit(several: Server) -> None:
    assert asked(several, "tiny", "Hello.").status_code == 200
    told = require_error(asked(several, BIG, "Hello."), 400, f"{BIG} needs at least ")
    assert "96.0 MiB of this machine's RAM offers" in told["message"]
    require_error(asked(several, BROKEN, "Hello."), 400, "cannot be run: ~/models/bad has no")
    require_error(asked(several, "~/models", "Hello."), 404, "and what /v1/models lists")
    assert several.models.current is several.model and several.model.runner is not None
    over = threading.Event()
    several.state.engine.submit(lambda work: over.wait(60), "Reading")
    with ThreadPoolExecutor() as clients:
        try:
            going = clients.submit(asked, several, "tiny", "Hello?")
            until(lambda: several.model.users > 0)
            refused = asked(several, OTHER, "Hello.")
        finally:
            over.set()
        assert going.result(30).json()["model"] == "tiny"
    told = require_error(refused, 503, f"{OTHER} needs ")
    assert "once tiny, which holds " in told["message"] and told["code"] == "busy"
    assert refused.headers["retry-after"]
    until(lambda: not several.model.users)
    assert asked(several, OTHER, "Hello.").json()["model"] == OTHER


@pytest.mark.long
def test_a_model_that_nobody_asks_is_unloaded_until_somebody_does(
    settings: Settings, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.server.models.IDLE", 0.02)
    config = ServerConfig(folder=tmp_path, one_model=True, unload_after=0.1)
    with serving(settings, config) as server:
        first = asked(server, None, "What is a heron?").json()["choices"]
        until(lambda: server.model.runner is None)
        assert statuses(server) == {"tiny": "unloaded"}
        assert server.http.get("/health").status_code == 200
        assert asked(server, "tiny", "What is a heron?").json()["choices"] == first
        require_error(asked(server, OTHER, "Hello."), 404, "this server has 'tiny'")
        until(lambda: server.model.runner is None)
        assert server.http.post("/tokenize", json={"prompt": "Hi"}).json()["count"] == 1


def test_freed_memory_is_given_back(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = threading.Event()
    monkeypatch.setattr("kvlite.server.models.IDLE", 0.02)
    monkeypatch.setattr("kvlite.server.models.trim_heap", given.set)
    gc.unfreeze()  # what others have left
    with serving(settings, ServerConfig(folder=tmp_path)):
        assert given.wait(60)
        assert gc.get_freeze_count() > 10_000  # of what was imported


@pytest.mark.parametrize(
    ("model", "names", "others"),
    [
        (
            "/data/Half-Q8_0.gguf",
            ["half-q8_0.gguf", "Half-Q8_0", "HALF-q8_0", "/data/half-q8_0"],
            ["half", "data", "/data", "/data/", "other/half-q8_0", ".gguf", "", "/"],
        ),
        ("big-00001-of-00003.gguf", ["big", "BIG.gguf"], ["big-00002-of-00003", "bi"]),
        ("Qwen/Qwen3-8B", ["qwen3-8b", "qwen/qwen3-8b"], ["qwen", "unsloth/Qwen3-8B"]),
        ("ollama:llama3.2:3b", ["llama3.2:3b", "ollama:Llama3.2:3b"], ["llama3.2", "3b"]),
        ("ollama:me/tiny:latest", ["tiny", "me/tiny", "tiny:latest"], ["me"]),
        ("C:\\models\\half.gguf", ["half"], ["models"]),
    ],
)
def test_names_that_mean_a_model(model: str, names: list[str], others: list[str]) -> None:
    assert [each for each in names if not is_alike(each, model)] == []
    assert [each for each in others if is_alike(each, model)] == []


def test_the_loaded_model_goes_by_its_file_name_and_path(
    several: Server, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tiny", None, "", "TINY", "tiny.gguf", "Tiny:latest", str(tiny_folder)):
        assert asked(several, name, "Hello.", max_tokens=1).json()["model"] == "tiny"
    assert several.http.get("/v1/models/TINY").json()["id"] == "tiny"
    monkeypatch.chdir(tiny_folder.parent)
    assert names_of("tiny") == ["tiny", str(tiny_folder)]
    # Others of this machine go by short names as well, unless two share one.
    assert several.http.get("/v1/models/Other").json()["id"] == OTHER
    twice = Path.home() / "models" / "more" / "other"
    shutil.copytree(Path.home() / "models" / "other", twice)
    several.models._looked = float("-inf")
    until(lambda: "~/models/more/other" in statuses(several))
    require_error(several.http.get("/v1/models/Other"), 404, "no model 'Other'")
    shutil.rmtree(twice.parent)
    several.models._looked = float("-inf")
