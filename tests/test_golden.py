"""What kvlite does is what it did when it was recorded: answers, what is kept, accounts, plans.
What version 0.1.0 stored opens, and goes on as it did then.

`python -m tests.golden.record` records runs and plans anew, where a change is meant. Stored files
and expected.json beside them stay.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from .golden import stored
from .golden.play import Play, differences
from .golden.record import FILES, GOLDEN, Workshop, planned, played, prepare
from .golden.runs import PLANS, RUNS, Run

# Lines of a difference that are shown; one wrong token makes all that follow wrong.
SHOWN = 12


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLITE_DATA", str(folder / "data"))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        prepare(folder / "data")
        yield Workshop(folder)


@cache
def recorded(part: str, file: Path = GOLDEN) -> dict[str, Any]:
    return dict(json.loads(file.read_text())[part])


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder as version 0.1.0 left it, and its settings."""
    folder = tmp_path / "data"
    shutil.copytree(FILES, folder)
    monkeypatch.setenv("KVLITE_DATA", str(folder))
    monkeypatch.setenv("KVLITE_CONFIG", str(folder / "config"))
    return folder


def same(expected: Any, found: Any) -> None:
    lines = differences(expected, found)
    more = [f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    assert not lines, "\n".join(["differs from what was recorded:", *lines[:SHOWN], *more])


@pytest.mark.cases(5)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_is_as_recorded(shop: Workshop, run: Run, tmp_path: Path) -> None:
    same(recorded("runs")[run.name], played(shop, run, tmp_path))


@pytest.mark.cases(1)
@pytest.mark.parametrize("args", PLANS, ids=" ".join)
def test_a_plan_is_as_recorded(shop: Workshop, args: list[str]) -> None:
    same(recorded("plans")[" ".join(args)], planned(shop, args))


def test_nothing_else_was_recorded() -> None:
    assert {*recorded("runs")} == {run.name for run in RUNS}
    assert {*recorded("plans")} == {" ".join(args) for args in PLANS}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("run", "on"), stored.SAVED, ids=[run.name for run, _ in stored.SAVED])
def test_a_saved_conversation_opens_and_goes_on(
    shop: Workshop, run: Run, on: Callable[[Play], None], tmp_path: Path
) -> None:
    expected = recorded("conversations", stored.EXPECTED)[run.name]
    same(expected, stored.opened(shop, run, on, tmp_path))


def test_a_stored_document_is_answered_about(
    shop: Workshop, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_CONFIG", str(data / "no profiles"))
    same(recorded("others", stored.EXPECTED)["library"], stored.from_library(shop))


def test_the_apps_conversations_open_and_go_on(shop: Workshop, data: Path) -> None:
    same(recorded("others", stored.EXPECTED)["app"], stored.from_app(shop, data))


def test_profiles_are_read(data: Path) -> None:
    same(recorded("others", stored.EXPECTED)["profiles"], stored.from_profiles())


def test_a_calibration_is_used(shop: Workshop, data: Path) -> None:
    same(recorded("others", stored.EXPECTED)["calibration"], stored.from_calibration(shop))
