"""The tasks of a job: questions, each about one document, from files or from rows."""

import glob
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlite.config.plain_json import read_json
from kvlite.config.settings import OPTIONS, checked
from kvlite.documents.names import is_written_like_a_file
from kvlite.errors import SettingError, reason
from kvlite.jobs.rows import COLUMNS, READERS, Named

ANSWER = tuple(name for name, option in OPTIONS.items() if option.metadata["panel"] == "Answer")
"""Settings of single rows: all others are the job's."""
_NAMES = ("id", "document", "text", "question")
# Requests without a document that an engine answers at once.
_REQUESTS = 16


@dataclass(frozen=True)
class Task:
    """One question.

    Attributes:
        document: the file it is about; "" if it comes with its `text`, or is about none.
        settings: of its answer alone, by their names in `Settings`.
    """

    id: str
    question: str
    document: str = ""
    text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def tasks_in(
    place: str, questions: Sequence[str] = (), outs: Iterable[str | Path] = ()
) -> list[Task]:
    """The tasks in a place. Raises SettingError if there are none, or they cannot be read, with the
    row.

    Args:
        outs: files that answers go to, which are no documents.
        place: a folder or a glob of documents, or one document; or a .jsonl, .csv or .parquet file
            of rows. Rows name documents from the folder that the file is in.
        questions: to ask about each document; for rows, if these have no questions.
    """
    asked = [question.strip() for question in questions if question.strip()]
    suffix = Path(place).suffix.lower()
    if suffix in READERS:
        if os.path.isfile(place):
            return _of_rows(READERS[suffix](place), Path(place).parent, asked)
        if not _documents(place):
            raise SettingError(f"there is no file {place}: check the path")
    if not asked:
        raise SettingError(
            f"there is no question about the documents in {place}: give --questions, or a .jsonl, "
            f".csv or .parquet file with {COLUMNS}"
        )
    made = {os.path.abspath(out) for out in outs}
    documents = [each for each in _documents(place) if os.path.abspath(each) not in made]
    if not documents:
        raise SettingError(f"there is no document {place}: name a folder, a glob, or a file")
    folders = [os.path.dirname(os.path.abspath(each)) for each in documents]
    start = place if os.path.isdir(place) else os.path.commonpath(folders)
    seen: dict[str, str] = {}
    names = [new_id(os.path.relpath(each, start), each, seen) for each in documents]
    return _crossed([(*each, "") for each in zip(names, documents, strict=True)], asked, {})


def tasks_of(rows: Iterable[Mapping[str, Any]]) -> list[Task]:
    """The tasks in rows with id, question, and document or text; errors as of `tasks_in`."""
    return _of_rows(((f"row {at}", row) for at, row in enumerate(rows)), Path(), [])


def questions_in(given: Sequence[str]) -> list[str]:
    """Questions: each as it is, or a file with one on each line. Raises SettingError if a file is
    not there, or cannot be read, or has none."""
    found: list[str] = []
    for each in given:
        if not os.path.isfile(each):
            if is_written_like_a_file(each):
                raise SettingError(f"--questions {each}: there is no such file")
            found.append(each)
            continue
        try:
            lines = Path(each).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(
                f"--questions {each} cannot be read ({reason(error)}): give a text file in UTF-8 "
                "with a question on each line"
            ) from error
        found += lines
    asked = [question.strip() for question in found if question.strip()]
    if given and not asked:
        raise SettingError(f"--questions {' '.join(given)} holds no question: write one a line")
    return asked


def _documents(place: str) -> list[str]:
    if os.path.isdir(place):
        files = (file for file in Path(place).rglob("*") if file.is_file())
        inside = ((file, file.relative_to(place).parts) for file in files)
        return sorted(str(file) for file, parts in inside if not any(p[0] == "." for p in parts))
    if os.path.isfile(place):
        return [place]
    return sorted(file for file in glob.glob(place, recursive=True) if os.path.isfile(file))


def _of_rows(rows: Iterable[Named], folder: Path, questions: Sequence[str]) -> list[Task]:
    made: list[Task] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise SettingError(f"{where} is no row: each is a dict with {COLUMNS}")
        name, document, text, question = (_field(row, each, where) for each in _NAMES)
        if not name:
            raise _missing(where, "id")
        name = new_id(name, where, seen)
        if not document and not text:
            raise _missing(where, "document or text")
        if document and text:
            raise SettingError(f"{where} has a document and a text: leave one of them out")
        if not question and not questions:
            raise _missing(where, "question")
        if question and questions:
            raise SettingError(
                f"{where} has a question, and so has --questions: leave one of them out"
            )
        path = str(folder / Path(document).expanduser()) if document else ""
        settings = _settings(row, where)
        made += _crossed([(name, path, text)], questions, settings)
        if question:
            made.append(Task(name, question, path, text, settings))
    if not made:
        raise SettingError(f"there are no rows: each needs {COLUMNS}")
    return made


def new_id(name: str, where: str, seen: dict[str, str]) -> str:
    """An id as answers have it; it is added to those `seen`, with what errors call their rows.
    Raises SettingError if it is there."""
    name = printable(name)
    if name in seen:
        raise SettingError(
            f"{where} has the id {name!r}, as {seen[name]} has: give each row an id of its own"
        )
    seen[name] = where
    return name


def printable(name: str) -> str:
    """A name in UTF-8; what cannot be, as in names of files on Linux, is written in hexadecimal, so
    that different names stay different."""
    return name.encode("utf-8", "backslashreplace").decode()


def _missing(where: str, column: str) -> SettingError:
    return SettingError(f"{where} has no {column}: each row needs {COLUMNS}")


def _crossed(
    documents: Iterable[tuple[str, str, str]],
    questions: Sequence[str],
    settings: Mapping[str, Any],
) -> list[Task]:
    return [
        Task(f"{name}#{number}", question, document, text, settings)
        for name, document, text in documents
        for number, question in enumerate(questions, 1)
    ]


def _field(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise SettingError(f"{where} has {value!r} for its {name}: give a text")
    return str(value).strip()


def _settings(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = row.get("settings") or {}
    try:
        values = read_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise SettingError(f"{where} has settings that are no JSON ({reason(error)})") from error
    if not isinstance(values, Mapping):
        raise SettingError(
            f'{where} has {values!r} for its settings: give an object such as {{"max_new_tokens": '
            "20}"
        )
    values = {name: each for name, each in values.items() if each is not None}
    for name in values:
        if name not in ANSWER:
            raise SettingError(
                f"{where} has the setting {name!r}: a row can have {', '.join(ANSWER)}; others are "
                "given to the command"
            )
    return {name: checked(name, each, f"{where}: {name}") for name, each in values.items()}


def by_document(tasks: Iterable[Task]) -> list[list[Task]]:
    """Tasks about a document, with one system message, together, in the documents' order."""
    groups: dict[Hashable, list[Task]] = {}
    for task in tasks:
        groups.setdefault(beginning(task), []).append(task)
    return [*groups.values()]


def beginning(task: Task) -> Hashable:
    """What is read before a task's question."""
    return task.document, task.text, task.settings.get("system")


def shares_of(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Tasks that one engine answers at once: about one document, or some that are about none."""
    for group in by_document(tasks):
        size = len(group) if group[0].document or group[0].text else _REQUESTS
        yield from (group[at : at + size] for at in range(0, len(group), size))
