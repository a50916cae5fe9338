"""Run folders: stopped at any point, a run goes on to the same rows; another one is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlite.bench.folder import CONFIG, ROWS, RunFolder
from kvlite.bench.questions import QuestionRow
from kvlite.bench.rows import Row
from kvlite.errors import SettingError

CONFIGURATION = {"command": "niah", "options": {"tokens": [100], "kind": "pairs"}}


@dataclass(frozen=True, kw_only=True)
class SomeRow(Row):
    KEY: ClassVar = ("method", "budget")


GRID = [{"method": m, "budget": b, "answer": "é\n" * b} for m in ("a", "b") for b in (1, 2, 3)]


def opened(path: Path, config: Any = CONFIGURATION) -> RunFolder:
    return RunFolder(path, config, SomeRow)


def fill(folder: RunFolder) -> None:
    folder.begin()
    for row in GRID:
        if SomeRow.key(row) not in folder.done:
            folder.add(row)


WHOLE = "".join(json.dumps(row) + "\n" for row in GRID).encode()


@given(st.integers(0, len(WHOLE)))
def test_a_run_killed_at_any_byte_goes_on_to_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, bytes_written: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "new"
    folder = opened(path)
    assert not path.exists()
    folder.begin()
    (path / ROWS).write_bytes(WHOLE[:bytes_written])
    assert json.loads((path / CONFIG).read_text()) == CONFIGURATION
    folder = opened(path)
    assert folder.rows == GRID[: WHOLE[:bytes_written].count(b"\n")]
    fill(folder)
    assert folder.rows == GRID
    assert (path / ROWS).read_bytes() == WHOLE
    assert opened(path).rows == GRID


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({**CONFIGURATION, "command": "ruler"}, "with command 'niah', not 'ruler'"),
        (
            {"command": "niah", "options": {"tokens": [100, 200], "kind": "pairs"}},
            r"with options\.tokens \[100\], not \[100, 200\]",
        ),
        ({"command": "niah", "options": {"tokens": [100]}}, "options.kind 'pairs', not None"),
    ],
)
def test_another_configuration_is_refused(
    tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    fill(opened(tmp_path))
    with pytest.raises(SettingError, match=f"{tmp_path} holds a run {sentence}|{sentence}"):
        opened(tmp_path, config)
    assert opened(tmp_path).rows == GRID


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(SettingError, match="something else than a run"):
        opened(tmp_path)
    with pytest.raises(SettingError, match="is a file: name a folder"):
        opened(tmp_path / "letter.txt")
    run = tmp_path / "run"
    opened(run).begin()
    (run / ROWS).write_text("{broken}\n")
    with pytest.raises(SettingError, match="is damaged: name a new folder"):
        opened(run)
    (run / CONFIG).write_text("{")
    with pytest.raises(SettingError, match="is damaged: name a new folder"):
        opened(run)


def test_rows_of_an_older_version_go_on_by_the_names_of_this_one(tmp_path: Path) -> None:
    row = dict.fromkeys(("depth", "tokens", "entries_mean", "kv_bytes", "found", "leading"), 0)
    row |= {name: "" for name in QuestionRow.KEY if name != "depth"}
    row |= {"hit": True, "rouge": 0.0, "surprise": 0.0, "answer": "", "tier_bytes": 7}
    opened(tmp_path).begin()
    (tmp_path / ROWS).write_text(json.dumps(row) + "\n")
    (found,) = opened(tmp_path).rows
    assert QuestionRow(**found).host_kv_bytes == 7
