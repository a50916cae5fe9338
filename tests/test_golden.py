"""What kvlite does is what it did when it was recorded: answers, what is kept, accounts, plans.

`python -m tests.golden.record` records it anew, where a change is meant.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from .golden.play import differences
from .golden.record import GOLDEN, Workshop, planned, played, prepare
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
def recorded(part: str) -> dict[str, Any]:
    return dict(json.loads(GOLDEN.read_text())[part])


def same(expected: Any, found: Any) -> None:
    lines = differences(expected, found)
    more = [f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    assert not lines, "\n".join(["differs from what was recorded:", *lines[:SHOWN], *more])


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_is_as_recorded(shop: Workshop, run: Run, tmp_path: Path) -> None:
    same(recorded("runs")[run.name], played(shop, run, tmp_path))


@pytest.mark.parametrize("args", PLANS, ids=" ".join)
def test_a_plan_is_as_recorded(shop: Workshop, args: list[str]) -> None:
    same(recorded("plans")[" ".join(args)], planned(shop, args))


def test_nothing_else_was_recorded() -> None:
    assert {*recorded("runs")} == {run.name for run in RUNS}
    assert {*recorded("plans")} == {" ".join(args) for args in PLANS}
