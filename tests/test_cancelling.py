"""What is done before anything is read ends when it is cancelled: each stage between its steps."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlite.config.settings import Settings
from kvlite.conversation.runner import open_runner
from kvlite.errors import ModelError, Stopped
from kvlite.model.load import load_model
from kvlite.model.source import find_config, find_model
from kvlite.model.weights import Weights
from kvlite.planner.candidates import open_planner
from kvlite.planner.max_context import reaches
from tests.configs import PUBLISHED
from tests.hub import Hub
from tests.streamed import loaded

FP32 = Weights("fp32", torch.float32)
CPU = torch.device("cpu")


class After(threading.Event):
    """Set once it was asked so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.asked = 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked > self.times


@pytest.mark.long
@pytest.mark.parametrize("stream", ["off", "disk", "ram"])
def test_loading_ends_before_the_next_weight(stream: str, tiny_folder: Path) -> None:
    def load(cancel: threading.Event) -> Any:
        if stream == "off":
            return load_model(tiny_folder, device=CPU, weights=FP32, cancel=cancel)
        return loaded(stream, tiny_folder, device=CPU, weights=FP32, cancel=cancel)

    never = After(10**6)
    load(never)
    assert never.asked >= (2 if stream == "disk" else 20)
    for times in (0, 1, never.asked - 1):
        with pytest.raises(Stopped):
            load(After(times))
    load(After(10**6))


@pytest.mark.long
def test_opening_ends_at_each_stage(tiny_folder: Path) -> None:
    settings = Settings(model=str(tiny_folder), device="cpu")
    never = After(10**6)
    open_runner(settings, None, lambda tokenizer, max_context: 9, never)
    assert never.asked > 20
    for times in (0, 1, 2, 3, 4, never.asked - 1):
        with pytest.raises(Stopped):
            open_runner(settings, None, lambda tokenizer, max_context: 9, After(times))


def test_planning_ends_before_the_next_forecast(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama-3.1-8B"]))
    settings = Settings(model=str(tmp_path), vram="8GiB")
    cancel = threading.Event()
    planner = open_planner(settings, card="a card", cancel=cancel)
    planner.best(1000)
    known = len(planner.known)
    cancel.set()
    planner.best(1000)  # it is known what that takes
    with pytest.raises(Stopped):
        planner.best(2000)
    with pytest.raises(Stopped):
        reaches(planner)
    with pytest.raises(Stopped):
        open_planner(settings, card="a card", cancel=cancel)
    assert len(planner.known) == known


# --- downloads -----------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("find", [find_model, find_config])
def test_a_download_that_waits_for_the_network_ends(hub: Hub, find: Any) -> None:
    hub.silent.set()
    cancel, ended = threading.Event(), list[BaseException]()

    def download() -> None:
        try:
            find("a/b", None, cancel)
        except Stopped as stopped:
            ended.append(stopped)

    thread = threading.Thread(target=download)
    thread.start()
    assert hub.asked.wait(60)
    cancel.set()
    thread.join(60)
    assert not thread.is_alive() and len(ended) == 1


@pytest.mark.long
def test_a_download_that_breaks_off_is_one_sentence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["model.safetensors"] = b"x"
    hub.files["config.json"] = b"{}"
    with pytest.raises(ModelError, match=r"config\.json has no model_type"):
        find_model("a/b")
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "taken"))
    with pytest.raises(ModelError, match=r"a/b cannot be stored in .*taken.*HF_HOME"):
        find_model("a/b")
    hub.files.clear()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "other"))
    with pytest.raises(ModelError) as error:
        find_config("a/b")
    assert "a/b" in str(error.value) and "\n" not in str(error.value)
