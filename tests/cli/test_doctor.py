"""`kvlite doctor`: what is there, how fast it is, and remedies."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvlite.cli import doctor
from kvlite.cli.doctor import Check
from kvlite.memory import nvml, speeds
from kvlite.memory.nvml import Card
from kvlite.memory.speeds import measure_speeds
from tests.cli.conftest import Run

CARD = Card("RTX 4090", 24 << 30, 23 << 30, "580.65", "13.0", "8.9")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("config", "data", "cache", "models"):
        monkeypatch.setenv(f"KVLITE_{name.upper()}", str(tmp_path / name))
    return tmp_path


def found(name: str) -> Check:
    return next(each for each in doctor.checks_of_this_machine() if each.name == name)


def test_a_card_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "cards", lambda: [CARD])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found("torch").state == "problem"
    assert "pip install" in found("torch").remedy
    monkeypatch.setattr(torch.version, "cuda", "14.0")
    assert "update the driver, which is for CUDA 13.0" in found("torch").remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (found("torch").state, found("torch").remedy) == ("ok", "")
    assert found("card") == Check("card", "ok", "RTX 4090, 24.00 GiB, 23.00 GiB free")
    assert "580.65" in found("driver").found


def test_a_card_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Card("RTX 4090", 24 << 30, 9 << 30, "580.65", "13.0", "8.9")
    monkeypatch.setattr(nvml, "cards", lambda: [busy])
    assert found("card").state == "note"
    assert "nvidia-smi" in found("card").remedy


def test_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "cards", list)
    assert found("card").state == "note"


def test_cards_as_the_driver_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13_000,
        nvmlSystemGetDriverVersion=lambda: "580.65",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(total=24 << 30, free=23 << 30),
        nvmlDeviceGetCudaComputeCapability=lambda card: (8, 9),
        nvmlDeviceGetName=lambda card: "RTX 4090",
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert nvml.cards() == [CARD, CARD]

    def lost(card: int) -> None:
        raise RuntimeError("GPU is lost")

    driver.NVMLError, driver.nvmlDeviceGetMemoryInfo = RuntimeError, lost
    assert nvml.cards() == []


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(nvml, "cards", list)
    assert found("numba").remedy == "pip install numba"
    assert (found("triton").state, found("triton").remedy) == ("ok", "")
    monkeypatch.setattr(nvml, "cards", lambda: [CARD])
    assert found("triton").state == "problem"
    assert found("numba").state == "ok"


def test_a_folder_that_cannot_be_made(
    kvlite: Run, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders / "file").write_text("")
    monkeypatch.setenv("KVLITE_CACHE", str(folders / "file" / "cache"))
    done = kvlite("doctor", "--quick", "--json")
    checks = {each["name"]: each for each in done.json()["checks"]}
    assert checks["cache"]["state"] == "problem"
    assert "KVLITE_CACHE" in checks["cache"]["remedy"]
    assert checks["data"]["state"] == "ok"
    assert done.code == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is there on Linux alone")
def test_a_folder_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says that an administrator may write there."""
    monkeypatch.setenv("KVLITE_CACHE", "/proc/kvlite")
    assert found("cache").state == "problem"


def test_a_short_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 30))
    assert (found("cache").state, found("data").state) == ("note", "ok")


def test_speeds_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "LARGE", 1 << 20)
    monkeypatch.setattr(speeds, "SIDE", 64)
    made = measure_speeds(torch.device("cpu"), seconds=0.01)
    assert made.memory_bytes > 1e6
    assert made.operations > 1e6
    assert made.transfer_bytes is None


def test_people_get_a_table(kvlite: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "cards", list)
    monkeypatch.setattr(speeds, "measure_speeds", lambda device: speeds.Speeds(1.61e10, None, 5e11))
    done = kvlite("doctor")
    said = " ".join(done.out.split())
    assert "at most 1.0 tokens/s of an 8B model in 16 bits" in said
    assert "Remedy: if this machine has one" in said
    assert max(map(len, done.out.splitlines())) <= 80
