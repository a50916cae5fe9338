"""The file that answers go to: a line of JSON each, on disk when it is answered."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvlite.config.atomic_file import replaced
from kvlite.config.checked_file import from_json, sound
from kvlite.config.paths import cache_folder
from kvlite.config.settings import Settings
from kvlite.errors import SettingError, SnapshotError, reason
from kvlite.jobs.rows import pyarrow
from kvlite.jobs.tasks import Task

Job = dict[str, str]
"""Digests of what makes a job another one: its settings and its model. Tasks may be added."""

# Settings that change where and how fast an answer is made, not what is asked for.
_ELSEWHERE = (
    *("device", "vram", "stream", "chunk", "recall_limit", "checkpoint_limit"),
    *("never_lossy", "measure", "speculate"),
)


def job_of(settings: Settings) -> Job:
    """What tells a job from others, before its model is loaded."""
    values = {
        name: value
        for name, value in vars(settings).items()
        if name not in _ELSEWHERE and name != "model"
    }
    return {"settings": _digest(values)}


def task_digest(task: Task) -> str:
    """What tells a task from others of the same id."""
    own = [dict(task.settings)] if task.settings else []
    return _digest([task.question, task.document, task.text, *own])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


# How every row begins.
_BEGINS = b'{"id": '


@dataclass
class Written:
    """What a file of answers holds.

    Attributes:
        job: whose answers they are; empty if there are none.
        done: by the id of each row, the digest of its task.
        failed: those of them that have an error.
        nbytes: of whole rows; what follows was being written when the program was ended.
    """

    job: Job = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    nbytes: int = 0

    @classmethod
    def of(cls, path: Path) -> "Written":
        """What is there. Raises SettingError if it is no file of answers, or cannot be read."""
        made, where = cls(), f"--out {path}"
        if not path.exists():
            return made
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        made._take(line, where, number)
                    elif not line.startswith(_BEGINS[: len(line)]):
                        raise _foreign(where, number)
        except OSError as error:
            raise SettingError(f"--out {path} cannot be read ({reason(error)})") from error
        return made

    def _take(self, line: bytes, where: str, number: int) -> None:
        with sound(lambda _: _foreign(where, number)):
            row = from_json(line)
            name, job, error = str(row["id"]), dict(row["job"]), row["error"]
            task = str(row["task"])
        if self.job and job != self.job:
            raise SettingError(f"{where} has answers of several jobs: name another file")
        self.job, self.nbytes = job, self.nbytes + len(line)
        self.done[name] = task
        if error is not None:
            self.failed.add(name)

    def require(self, job: Job, tasks: Sequence[Task], path: Path) -> None:
        """Raises SettingError if the answers are another job's, or one of them another task's."""
        other = [part for part, digest in job.items() if self.job.get(part, digest) != digest]
        if other:
            raise SettingError(
                f"--out {path} has answers of another job, of other {' and '.join(other)}: give "
                "what was given then, or name another file"
            )
        for task in tasks:
            if self.done.get(task.id, digest := task_digest(task)) != digest:
                raise SettingError(
                    f"--out {path} has under the id {task.id!r} an answer to another question, or "
                    "about another document: give what was given then, or name another file"
                )


class Writer:
    """Adds rows to the end of a file; `written` is what was there when it was opened."""

    def __init__(self, file: IO[bytes], job: Job, path: Path, written: Written) -> None:
        self._file, self._job, self._path = file, job, path
        self.written = written

    def add(self, row: Mapping[str, Any], task: Task) -> None:
        """Add a task's row; it is on disk when this returns. Raises SnapshotError if it cannot be
        written; the job can go on later."""
        line = json.dumps({**row, "task": task_digest(task), "job": self._job}, ensure_ascii=False)
        left = memoryview(line.encode("utf-8", "replace") + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self._path, error) from error


@contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Let no other program write a file of answers meanwhile.

    Raises:
        SnapshotError: another one does.
        OSError: the cache folder, where others look for that, cannot be used.
    """
    from filelock import FileLock, Timeout

    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    locks = cache_folder() / "jobs"
    locks.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(locks / f"{name}.lock", timeout=0).acquire()
    except Timeout:
        raise SnapshotError(
            f"{path} is being written by another program: wait until that has ended"
        ) from None
    with held:
        yield


@contextmanager
def writing(path: Path, job: Job, tasks: Sequence[Task], *, retry: bool) -> Iterator[Writer]:
    """Begin a file of answers to tasks that is `reserved`, or go on with it.

    Args:
        retry: drop rows of these tasks that have an error first.

    Raises:
        SettingError: it holds something else.
        SnapshotError: it cannot be written.
    """
    try:
        written = Written.of(path)
        written.require(job, tasks, path)
        if retry and (again := written.failed & {task.id for task in tasks}):
            written = _without(path, written, again)
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise _unwritable(path, error) from error
    with file:
        try:
            file.truncate(written.nbytes)
        except OSError as error:
            raise _unwritable(path, error) from error
        yield Writer(file, job, path, written)


def record_of(out: Path) -> Path:
    """The file that rows are added to: --out, or one beside Parquet, which cannot grow."""
    return out.with_name(f"{out.name}.jsonl") if out.suffix.lower() == ".parquet" else out


def publish(record: Path, out: Path) -> None:
    """Make --out from its record, if it is another file: a column a field; metrics and sources are
    JSON. Raises SettingError if pyarrow is not installed, and SnapshotError if it cannot be
    written."""
    if out == record:
        return
    arrow, parquet = pyarrow()
    try:
        with record.open("rb") as lines:
            rows = [from_json(line) for line in lines]
        for row in rows:
            for name in ("metrics", "sources"):
                row[name] = json.dumps(row.get(name))
        columns = dict.fromkeys(name for row in rows for name in row)
        with replaced(out) as file:
            parquet.write_table(arrow.Table.from_pylist([columns | row for row in rows]), file)
    except (arrow.ArrowException, OSError) as error:
        raise _unwritable(out, error) from error


def _without(path: Path, written: Written, names: set[str]) -> Written:
    with path.open("rb") as before, replaced(path) as file:
        for line in before.read(written.nbytes).splitlines(keepends=True):
            if str(from_json(line)["id"]) not in names:
                file.write(line)
    return Written.of(path)


def _foreign(where: str, number: int) -> SettingError:
    return SettingError(
        f"{where} is there already, and line {number} is no answer of a job: name another file"
    )


def _unwritable(path: Path, error: Exception) -> SnapshotError:
    why = getattr(error, "strerror", None) or error
    return SnapshotError(
        f"{path} cannot be written ({why}): what is there stays, and the same command goes on from "
        "it"
    )
