"""The first start on a machine with a card proposes models that fit it, once."""

import sys
from io import StringIO
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from kvlite.cli import first_start
from kvlite.cli.console import Screen
from kvlite.cli.first_start import with_first_model
from kvlite.config.profiles import Profiles
from kvlite.config.resolve import Resolved, resolve
from kvlite.config.settings import EMBEDDED_MODEL, Settings
from kvlite.memory.nvml import Card
from kvlite.planner.candidates import open_planner
from kvlite.planner.fitting import proposals
from tests.cli.conftest import Run
from tests.hub import Hub

# Of the models' own cards: billions of parameters.
PARAMETERS = {
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.15,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "openai/gpt-oss-20b": 20.91,
    "Qwen/Qwen3-8B": 8.19,
    "ibm-granite/granite-3.3-8b-instruct": 8.17,
    "Qwen/Qwen3-4B": 4.02,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "HuggingFaceTB/SmolLM3-3B": 3.08,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-0.6B": 0.60,
}
CARD = Card("RTX 4090", 24 << 30, 23 << 30, "580", "13.0", "8.9")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card, someone at the terminal, and nothing decided."""
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVLITE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(first_start, "cards", lambda: [CARD])
    monkeypatch.setattr(first_start, "at_terminal", lambda: True)


def started(
    tmp_path: Path, typed: str, *files: str, quiet: bool = False, **flags: str
) -> tuple[Resolved, str]:
    """What a start makes of what is typed, and what it shows."""
    profile = Profiles(tmp_path / "config").chosen(None, {})
    shown, stdin = StringIO(), sys.stdin
    screen = Screen(file=shown, quiet=quiet, force_terminal=True, width=200, color_system=None)
    sys.stdin = StringIO(typed)
    try:
        resolved = resolve({"vram": "4GiB", **flags}, {}, profile)
        return with_first_model(resolved, screen, files), shown.getvalue()
    finally:
        sys.stdin = stdin


def test_those_proposed_fit_as_they_are_published() -> None:
    for vram, names in {
        "24GiB": ["openai/gpt-oss-20b", "Qwen/Qwen3-8B"],
        "6GiB": ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"],
        "2GiB": [],
    }.items():
        found = [*islice(proposals(Settings(vram=vram, weights="nf4")), 2)]
        assert [each.name for each in found] == names
        for each in found:
            assert each.plan.fits and each.plan.tokens > 32_000 and each.plan.choice.stream == "off"
            assert each.nbytes < each.plan.peak_bytes <= each.plan.room.tensors
            count = 1e9 * PARAMETERS[each.name]
            assert abs(each.nbytes / 2 / count - 1) < 0.02 or "gpt-oss" in each.name


@pytest.mark.long
def test_one_that_is_taken_is_pulled_and_used_from_then_on(
    tmp_path: Path, hub: Hub, kvlite: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved, shown = started(tmp_path, "7\n2\n", vram="24GiB")
    assert "1. openai/gpt-oss-20b: 12.8" in shown and "GiB in use" in shown
    assert "2. Qwen/Qwen3-8B: 15.26 GiB to download" in shown and "a card of 24GiB" in shown
    assert resolved.settings.model == "Qwen/Qwen3-8B"
    (here,) = (tmp_path / "home" / "hub").glob("models--*/snapshots/*")
    assert {each.name for each in here.iterdir()} == {*hub.files}
    # From then on it is the profile's, and nobody is asked.
    resolved, shown = started(tmp_path, "")
    assert resolved.settings.model == "Qwen/Qwen3-8B" and not shown
    answer = kvlite("config", "--json").json()["settings"]["model"]
    assert answer["value"] == "Qwen/Qwen3-8B" and answer["from"] == "profile"
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    (tmp_path / "text.txt").write_text("A heron stands in the water.")
    done = kvlite("ask", tmp_path / "text.txt", "Which bird?", "--max-tokens", "2", "--json")
    assert done.code == 0 and done.json()["answer"]


def test_who_takes_none_is_not_asked_again(tmp_path: Path) -> None:
    for typed in ("0\n", ""):
        resolved, shown = started(tmp_path, typed)
        assert resolved.settings.model == EMBEDDED_MODEL and "Download one" in shown
        again, shown = started(tmp_path, "1\n")
        assert again.settings.model == EMBEDDED_MODEL and not shown
        (tmp_path / "data" / "models-proposed").unlink()
    assert not (tmp_path / "config").exists()


def test_nobody_is_asked_where_nobody_answers_or_a_model_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quiet(*files: str, **given: object) -> bool:
        shown = started(tmp_path, "1\n", *files, **given)[1]  # type: ignore[arg-type]
        return "Download" not in shown

    assert quiet(quiet=True) and quiet("talk.kv") and quiet(model="Qwen/Qwen3-0.6B")
    for name, found in (("at_terminal", False), ("cards", [])):
        with monkeypatch.context() as patch:
            patch.setattr(first_start, name, lambda found=found: found)
            assert quiet()
    with monkeypatch.context() as patch:  # a card that this torch cannot use
        patch.setattr(
            "kvlite.planner.fitting.open_planner",
            lambda given, **more: open_planner(given.replace({"vram": "auto"}), **more),
        )
        assert quiet()
    resolved = resolve({}, {}, None)
    assert with_first_model(resolved, Console(file=StringIO())) is resolved
