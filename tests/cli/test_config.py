"""`kvlite config`: every setting's value, and where it comes from."""

import re
from pathlib import Path

import pytest

from kvlite.config.settings import OPTIONS, Settings
from tests.cli.conftest import Refused, Run


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile."""
    for folder in ("config", "data", "cache"):
        monkeypatch.setenv(f"KVLITE_{folder.upper()}", str(tmp_path / folder))
    path = tmp_path / "config" / "profiles" / "mine.toml"
    path.parent.mkdir(parents=True)
    path.write_text("top_k = 9\ntemperature = 0.5\nbudget = '9%'\nstop = ['a', 'b']\n")
    return path


def test_each_place_is_named(
    kvlite: Run, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_TOP_K", "8")
    monkeypatch.setenv("KVLITE_BUDGET", "8%")
    monkeypatch.setenv("KVLITE_KVBITS", "8")
    done = kvlite("config", "--profile", "mine", "--top-k", "7", "--max-tokens", "256", "--json")
    found = done.json()
    profile = {"from": "profile", "name": "mine", "path": str(mine)}
    expected = {
        name: {"value": getattr(Settings(), name), "from": "default"} for name in OPTIONS
    } | {
        "top_k": {"value": 7, "from": "flag", "name": "--top-k"},
        "max_new_tokens": {"value": 256, "from": "flag", "name": "--max-tokens"},
        "budget": {"value": "8%", "from": "environment", "name": "KVLITE_BUDGET"},
        "temperature": {"value": 0.5, **profile},
        "stop": {"value": ["a", "b"], **profile},
        "logit_bias": {"value": [], "from": "default"},
    }
    assert found["settings"] == expected
    values = {"top_k": 9, "temperature": 0.5, "budget": "9%", "stop": ["a", "b"]}
    assert found["profile"] == {"name": "mine", "path": str(mine), "settings": values}
    assert found["folders"] == {each: str(tmp_path / each) for each in ("config", "cache", "data")}
    assert found["unknown_variables"] == ["KVLITE_KVBITS"]
    note = "Note: KVLITE_KVBITS is not a setting and changes nothing: did you mean KVLITE_KV_BITS?"
    assert (done.code, done.err) == (0, f"{note}\n")


def test_a_table_for_people(
    kvlite: Run, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("KVLITE_KVBITS", "8")
    monkeypatch.setenv("KVLITE_SEED", "3")
    done = kvlite("config", "--profile", "mine", "--system", "[red]x")
    rows = dict(re.findall(r"^│ (\w+) +│ (.*) │$", done.out, re.MULTILINE))
    shown = {name: [cell.strip() for cell in row.split("│")] for name, row in rows.items()}
    assert {*OPTIONS, "config", "data", "cache"} == {*shown}
    assert shown["system"] == ["[red]x", "flag --system"]
    assert shown["seed"] == ["3", "environment KVLITE_SEED"]
    assert shown["stop"] == ['["a", "b"]', f"profile mine ({mine})"]
    assert shown["chunk"] == ["not set", "default"]
    assert shown["never_lossy"] == ["false", "default"]
    assert shown["config"] == [str(tmp_path / "config")]
    assert f"Profile: mine ({mine})" in done.out
    assert "KVLITE_KVBITS is not a setting" in done.err
    monkeypatch.setenv("KVLITE_FROBNICATE", "8")
    done = kvlite("config", "--json")
    assert done.code == 0 and "did you mean KVLITE_KV_BITS?" in done.err
    assert "KVLITE_FROBNICATE is not a setting and changes nothing: `kvlite config` has" in done.err
    assert done.code == 0


def test_bad_input(refused: Refused, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(["config", "--top-p", "2"], "--top-p 2", "between 0 and 1")
    refused(["config", "--profile", "his"], "--profile 'his'", "saved are mine")
    refused(["config", "more"], "more", "kvlite config --help")
    monkeypatch.setenv("KVLITE_NEVER_LOSSY", "perhaps")
    refused(["config"], "KVLITE_NEVER_LOSSY 'perhaps'", "true or false")
    monkeypatch.delenv("KVLITE_NEVER_LOSSY")
    monkeypatch.setenv("KVLITE_BUDGET", "abc")
    refused(["config"], "KVLITE_BUDGET 'abc'", "is not a budget")
