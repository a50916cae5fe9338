"""`kvlite plan`, and plans of other commands, by the command line."""

import gc
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from kvlite.errors import KvliteError
from tests.cli.conftest import Refused, Run
from tests.test_plan import LLAMA_8B, WEIGHTS


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_a_card_that_is_not_here(kvlite: Run, llama: Path) -> None:
    found = kvlite(
        "plan", llama, "--vram", "24GiB", "--card", "RTX 4090", "--context", 65536, "--json"
    ).json()
    assert found["phases"]["load"]["weights"] == WEIGHTS
    assert found["peak_bytes"] == max(sum(items.values()) for items in found["phases"].values())
    assert found["fits"]
    longer = kvlite("plan", llama, "--vram", "24GiB", "--context", 200_000, "--json")
    assert longer.code == 1 and longer.json()["asked_tokens"] > longer.json()["tokens"]
    assert (found["tokens"], found["asked_tokens"], found["max_context"]) == (65536, 65536, 131072)
    assert found["tokens_per_s_at_most"] > 40
    assert len(found["fitting"]) == 18
    assert found["reasons"][-1] == "the cache has 8 bits a number"
    assert found["kept_tokens"] == 65536
    unknown = kvlite("plan", llama, "--vram", "24GiB", "--context", 1000, "--card", "RTX 9999")
    assert "How fast RTX 9999 answers is not known." in unknown.out
    assert "a desktop (assumed) 614.0 MiB" in unknown.out.replace("\n", " ")
    server = kvlite("plan", llama, "--vram", "80GiB", "--context", 1000, "--card", "H100")
    assert "desktop" not in server.out


def test_tables_for_people(kvlite: Run, llama: Path) -> None:
    shown = kvlite("plan", llama / "config.json", "--vram", "4GiB")
    assert shown.code == 1
    for part in ("to load", "to read", "to choose", "to answer", "one layer's KV", "margin"):
        assert part in shown.out
    assert "does not fit" in shown.out
    assert "smaller model" in shown.out


def test_each_card_has_a_line(
    kvlite: Run, refused: Refused, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.planner.max_context.reaches", lambda planner: [])
    given = ["plan", llama, "--vram", "12GiB", "--device", "cuda:0,cuda:1", "--weights", "bf16"]
    shown = kvlite(*given, "--context", 16384)
    assert shown.code == 0
    (first, last), others = re.findall(r" ([0-9]+)-([0-9]+) ", shown.out)
    assert (first, others) == ("0", (f"{int(last) + 1}", "31"))
    for part in ("2 x a card of 12GiB", "work", "free"):
        assert part in shown.out
    refused([*given, "--scores", "host"], "--scores host is for one card")
    refused([*given, "--stream", "disk"], "--stream disk is for one card")
    refused([*given, "--method", "minicache"], "minicache merges layers")
    refused([*given[:4], "--device", "cpu,cuda"], "unknown device 'cpu,cuda'")


def test_a_plan_is_shown_before_it_is_known_what_else_fits(
    kvlite: Run, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        assert not gc.isenabled()
        raise KvliteError("the table is not made")

    monkeypatch.setattr("kvlite.planner.max_context.reaches", fails)
    shown = kvlite("plan", llama, "--vram", "24GiB")
    assert (shown.code, shown.err) == (2, "kvlite: the table is not made\n")
    assert "offered: fits." in shown.out
    assert kvlite("plan", llama, "--vram", "24GiB", "--json").out == ""
    assert gc.isenabled()


def test_a_document_is_counted_by_the_models_own_tokenizer(
    kvlite: Run, model: Path, text: Path
) -> None:
    found = kvlite("plan", model, "--device", "cpu", "--doc", text, "--json").json()
    assert 200 < found["asked_tokens"] < 320
    assert found["device"] == "this machine's RAM"
    assert found["host_bytes"] == 0 and not found["is_guess"]


def test_a_document_that_no_tokenizer_counts_is_guessed_and_said(
    kvlite: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    for file in other.glob("tokenizer*"):
        file.unlink()
    flags = ("plan", other, "--device", "cpu", "--doc", text)
    assert kvlite(*flags, "--json").json()["is_guess"]
    assert "are a guess, one for 4 characters" in kvlite(*flags).out


def test_bad_input(refused: Refused, llama: Path, text: Path) -> None:
    refused(["plan", llama, "--vram", "lots"], "--vram", "lots")
    refused(["plan", llama, "--device", "cuda"], "cuda", "--vram")
    refused(["plan", llama / "nothing"], "nothing")
    refused(["plan", llama, "--context", 5, "--doc", text], "--context", "--doc")
    refused(["plan", llama, "--vram", "24GiB", "--method", "mine"], "mine")
    refused(["plan", llama, "--recall-limit=-1"], "--recall-limit", "-1")


@pytest.mark.long
def test_asking_says_what_was_planned(kvlite: Run, model: Path, text: Path) -> None:
    args = ("ask", text, "Why?", "--model", model, "--max-tokens", 4, "--vram", "64MiB")
    found = kvlite(*args, "--json").json()
    assert found["peak_bytes"] <= 64 << 20
    assert found["plan_error"] == pytest.approx(0, abs=0.02)
    assert f"planned {found['planned_peak_bytes'] / (1 << 20):.1f} MiB" in kvlite(*args).err
