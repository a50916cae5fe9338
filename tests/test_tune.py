"""Tuning measures what the benches measure, of the user's own document."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvlite.bench.advice import TuneRow, in_race
from kvlite.bench.case import Recipe
from kvlite.bench.fidelity import fidelity
from kvlite.bench.prose import bundled_prose
from kvlite.bench.questions import ask
from kvlite.bench.task import measure
from kvlite.bench.tune import AFTER, LEAST_TOKENS, Tune
from kvlite.conversation.runner import Runner, load
from kvlite.errors import SettingError
from tests.cli.conftest import model_of

TOKENS = 260


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return load(str(model_of(tmp_path_factory.mktemp("tiny"), 512)))


def task(tmp_path: Path, words: int = 400) -> Tune:
    path = tmp_path / "report.txt"
    path.write_text(" ".join(bundled_prose().split()[:words]))
    return Tune(
        file=str(path),
        tokens=TOKENS,
        methods=["snapkv:window=8"],
        budgets=["20%"],
        kv_bits=["16", "4"],
        recall=["off", "20"],
        recall_bits=["16"],
        most_lost=0.1,
    )


@pytest.mark.long
def test_rows_are_those_of_the_benches(runner: Runner, tmp_path: Path) -> None:
    """A fact's loss is its surprise beyond the full cache's; a passage's the divergence."""
    tune = task(tmp_path)
    work = list(islice(tune.work(runner), 4))
    doing = [tune.doing(keys) for keys, _ in work[2:]]
    assert doing == [
        "Tuning: a hidden fact in part 2, 10 settings",
        "Tuning: a passage in part 2, 10 settings",
    ]
    facts, passages = (list(measure(work[index : index + 1])) for index in (2, 3))
    names = {choice.method.name for choice in tune.choices}
    assert names == {"full", "snapkv", "spans"}
    assert len(facts) == len(passages) == len(tune.choices) == 1 + 1 + 2 * 2 * 2
    recipe: Recipe = work[2][1].args[1]  # type: ignore[attr-defined]
    said = list(measure(ask(runner.model, [recipe], tune.choices, ["unknown"])))
    (full,) = (row.surprise for row in said if row.method == "full" and row.kv_bits == "16")
    ids = runner.tokenizer.encode(tune.text)
    start = int(0.618 * (len(ids) - TOKENS - AFTER))
    read = fidelity(runner.model, ids, tune.choices, starts={TOKENS: [start]}, after=AFTER)
    for row, other in zip(facts, said, strict=True):
        assert row.lost == pytest.approx(max(0, other.surprise - full), abs=1e-5)
        assert (row.kv_bytes, row.recall, row.length) == (other.kv_bytes, other.recall, TOKENS)
        assert row.ms > 0
    for row, measured in zip(passages, measure(read), strict=True):
        assert row.lost == pytest.approx(measured.kl, abs=1e-6)
        assert (row.known, row.budget) == (measured.agreement, measured.budget)
    assert any(row.lost for row in facts) and any(row.lost for row in passages)


@pytest.mark.long
def test_what_drops_out_is_not_measured_again(runner: Runner, tmp_path: Path) -> None:
    """A run that goes on measures what the whole run would have."""
    tune, rows = task(tmp_path), list[dict[str, Any]]()
    tune.resume(rows)
    for row in measure(islice(tune.work(runner), 4)):
        rows.append(row.to_json())
    counts = [sum(row["part"] == part for row in rows) for part in (0, 1)]
    left = in_race([TuneRow(**row) for row in rows[: counts[0]]], tune.choices)
    assert counts == [2 * len(tune.choices), 2 * len(left)] and len(left) < len(tune.choices)
    for stopped in (counts[0] - 1, counts[0] + 1):
        again, begun = task(tmp_path), rows[:stopped]
        again.resume(begun)
        done = frozenset(tuple(row[name] for name in TuneRow.KEY) for row in begun)
        for row in measure(islice(again.work(runner), 4), done):
            begun.append(row.to_json())
        assert [{**row, "ms": 0} for row in begun] == [{**row, "ms": 0} for row in rows]


def test_a_document_too_short_is_refused(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=rf"tuning takes {LEAST_TOKENS * 5 // 4} at least"):
        task(tmp_path, 100).work(runner)


def test_no_unit_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("kvlite.bench.task.monotonic", lambda: now)

    def unit(seconds: float) -> tuple[list[tuple[str]], Callable[[], Iterator[str]]]:
        def run() -> Iterator[str]:
            nonlocal now
            now += seconds
            yield "row"

        return [(str(seconds),)], run

    work: list[Any] = [unit(3), unit(5), unit(4)]
    assert len(list(measure(work, until=13.5))) == 3
    now = 0.0
    assert len(list(measure(work, until=12))) == 2  # the third may take 5, and there are 4
    assert now == 8
    assert not list(measure(work, until=8))
