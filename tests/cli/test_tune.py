"""`kvlite tune`: what it leaves, how it goes on, what it refuses."""

from pathlib import Path

import pytest

from kvlite.bench.prose import bundled_prose
from kvlite.cli.screen import ReadingBar
from tests.cli.conftest import Refused, Run

GRID = ["--tokens", "250", "--method", "snapkv:window=8", "--budget", "25%", "--recall", "off,20"]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.txt"
    path.write_text(" ".join(bundled_prose().split()[:340]))
    return path


@pytest.mark.long
def test_it_saves_a_profile_and_goes_on(
    kvlite: Run, model: Path, report: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlite.bench.tune.ROUNDS", 1)
    titles = list[str]()
    monkeypatch.setattr(ReadingBar, "title", lambda self, title: titles.append(title))
    words = ["tune", report, "--model", model, *GRID]
    found = kvlite(*words, "--json").json()
    assert len(found["rows"]) == 2 * (2 + 2 * 2 * 2)
    assert titles[0].startswith("Tuning: a hidden fact in part 1, ") and len(titles) == 2
    profile = data.parent / "config" / "profiles" / "tuned.toml"
    first, *settings = profile.read_text().splitlines()
    assert first == f"# {found['reason']}"
    assert f'method = "{found["recommended"]["method"]}"' in settings
    assert any(str(model) in line for line in settings)
    (folder,) = (data / "bench").iterdir()
    assert (folder / "quality-tune.png").is_file() and (folder / "table.md").is_file()

    monkeypatch.setattr("kvlite.bench.tune.ROUNDS", 2)
    before = (folder / "rows.jsonl").read_text()
    again = kvlite(*words, "--save", "mine")
    assert again.code == 0
    assert (folder / "rows.jsonl").read_text().startswith(before)
    assert "nats lost" in again.out and again.out.endswith("Use it with --profile mine\n")
    assert profile.with_name("mine.toml").is_file()

    ask = ["ask", report, "Who?", "--profile", "tuned", "--max-tokens", "2", "--json"]
    metrics = kvlite(*ask).json()
    assert metrics["method"] == found["recommended"]["method"]


def test_bad_input_is_refused(
    kvlite: Run, refused: Refused, model: Path, report: Path, data: Path
) -> None:
    words = ["tune", report, "--model", model]
    refused([*words, "--budget", "512"], "512", "such as 6%")
    refused([*words, "--method", "nonsense"], "nonsense", "choose from")
    refused([*words, "--recall", "often"], "often", "give 128")
    refused([*words, "--save", "none"], "none", "letters")
    refused(["tune", "nowhere.txt", "--model", model], "nowhere.txt", "check the path")
    (data.parent / "config" / "profiles").mkdir(parents=True)
    (data.parent / "config" / "profiles" / "mine.toml").touch()
    refused([*words, "--save", "mine"], "mine", "--force")
