"""Engines in several processes with one queue: every row once, whatever ends them."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.errors import KvliteError, ModelError, SettingError
from kvlite.jobs.answer import BatchAnswer
from kvlite.jobs.tasks import Task
from kvlite.jobs.workers import Place, answered_by_workers
from tests.cli.stand_in import StandIn


class Job:
    """Two processes, and what they did."""

    def __init__(self, folder: Path, *kinds: str) -> None:
        self.log = folder / "log"
        self.log.touch()
        self.places = [
            Place(f"place {n}", (str(self.log), each), {}) for n, each in enumerate(kinds)
        ]

    def run(self, tasks: list[Task], callbacks: Callbacks = NO_CALLBACKS) -> Iterator[BatchAnswer]:
        return answered_by_workers(StandIn, self.places, tasks, callbacks)

    @property
    def read(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, "works", "works")


def asked(*documents: str) -> list[Task]:
    questions = "who", "where", "when"
    return [Task(f"{each}#{q}", q, document=each) for each in documents for q in questions]


def test_what_ends_processes_is_tried_three_times_and_the_last_times_alone(job: Job) -> None:
    notes, tasks = list[str](), asked("a", "b", "crash", "c", "d", "e", "f", "g")
    rows = list(job.run(tasks, Callbacks(notify=notes.append)))
    assert Counter(row.id for row in rows) == {task.id: 1 for task in tasks}
    errors = [row for row in rows if row.error]
    assert [row.id for row in errors] == ["crash#where", "crash#when"]
    assert "ended 3 times" in str(errors[0].error)
    assert all(row.answer for row in rows if not row.error)
    first, *others = (names for names in job.read if "crash" in names)
    assert others == [["crash"]] * 2
    assert {name for row in rows if not row.error for name in [row.document]} >= {*first}
    assert {"place 0: plan: it is a stand-in", "place 0: reading"} < {*notes}


def test_cancel_ends_what_would_go_on(job: Job) -> None:
    """Also while a document is read."""
    cancel, before = threading.Event(), {*psutil.Process().children()}
    reading = Callbacks(lambda *_: None, lambda note: "plan" in note or cancel.set(), cancel)
    assert [*job.run(asked("endless"), reading)] == []
    assert not {*psutil.Process().children()} - before


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("refuses", SettingError, "there is no room"),
        ("ends", ModelError, r"process on place 1 ended 3 times .* \(exit code 3"),
    ],
)
def test_one_that_cannot_begin(
    tmp_path: Path, kind: str, error: type[KvliteError], said: str
) -> None:
    job = Job(tmp_path, "works", kind)
    with pytest.raises(error, match=said) as raised:
        list(job.run(asked("endless", "endless too", "endless as well")))
    if kind == "refuses":
        assert raised.value.__notes__ == ["on place 1"]
