"""`kvlite batch --devices`: the rows of one engine, one engine a device."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kvlite.errors import SettingError
from kvlite.jobs.output import Writer
from kvlite.jobs.tasks import Task
from kvlite.model.devices import choose_devices
from tests.cli.conftest import Refused, Run


def test_which_devices(
    refused: Refused, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["batch", text, "--questions", "Who?", "--out", text.with_suffix(".jsonl")]
    asked += ["--model", model]
    refused([*asked, "--devices", "cpu,tpu"], "'tpu'", "use auto, cpu or cuda")
    refused([*asked, "--devices", "all"], "--devices all", "no CUDA device")
    refused([*asked, "--devices", "cpu", "--ray", "local"], "--devices cpu and --ray")
    refused([*asked, "--devices", "cpu", "--device", "cpu"], "--devices cpu and --device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cards = torch.device("cuda:0"), torch.device("cuda:1")
    assert choose_devices("all") == cards == choose_devices("cuda, cuda:1")
    with pytest.raises(SettingError, match="names cuda:0 twice"):
        choose_devices("cuda,cuda:0")
    for name in ("cuda:07", "cuda:999", "all,cpu", "mps"):
        with pytest.raises(SettingError, match="unknown device"):
            choose_devices(name)


@pytest.mark.long
def test_rows_are_those_of_one_engine(
    kvlite: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed, then Ctrl-C; the command goes on without --devices."""
    folder, me = tmp_path / "reports", psutil.Process()
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"The cat sat on mat {number} by the door. " * 20)
    flags = ["--questions", "Who?", "--questions", "Where?", "--model", model, "--max-tokens", "8"]
    alone, out = tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    assert kvlite("batch", folder, "--out", alone, *flags, "-q").code == 0
    command = ["batch", folder, "--out", out, *flags, "--json"]
    before, add, added = {*me.children(recursive=True)}, Writer.add, list[str]()

    def disturbs(self: Writer, row: Mapping[str, Any], task: Task) -> None:
        add(self, row, task)
        added.append(task.id)
        if len(added) == 1:
            begun = {*me.children()} - before  # each has children that open documents
            assert len(begun) == 2
            begun.pop().kill()
        if len(added) == 10:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "add", disturbs)
        stopped = kvlite(*command, "--devices", "cpu,cpu")
    assert stopped.code == 130 and stopped.json()["left"] == 2
    assert not {*me.children(recursive=True)} - before
    assert kvlite(*command).json()["answered_before"] == 10
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rows = {row["id"]: row for row in lines}
    assert len(rows) == len(lines) == 12 and [*rows][:10] == added
    kept = ("document", "question", "answer", "finish_reason", "error", "job", "task")
    local = {row["id"]: row for row in map(json.loads, alone.read_text().splitlines())}
    for name, row in local.items():
        assert {key: rows[name][key] for key in kept} == {key: row[key] for key in kept}
