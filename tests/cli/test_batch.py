"""`kvlite batch`: every row is answered once, as it would be alone, however often the job ends."""

import csv
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

import kvlite as library
from kvlite.conversation import together
from kvlite.conversation.metrics import Piece
from kvlite.conversation.sources import Source
from kvlite.jobs.output import Writer
from kvlite.jobs.tasks import Task
from kvlite.planner.plan import Plan
from kvlite.planner.planner import Planner
from tests.cli.conftest import Done, Refused, Run

QUESTIONS = ("Who sat?", "Who lay by the door?", "Where?")
FLAGS = ("--max-tokens", "4", "--budget", "64")


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Three documents of some 300 tokens, and a file of questions."""
    folder = tmp_path / "reports"
    folder.mkdir()
    for name, animal in (("a.txt", "cat"), ("b.md", "cow"), ("c.txt", "owl")):
        (folder / name).write_text(
            f"The {animal} sat on the mat and the dog lay by the door. " * 20
        )
    (tmp_path / "questions.txt").write_text("\n".join([*QUESTIONS, ""]))
    return folder


class Job:
    """A job's command line, and the file it writes."""

    def __init__(self, kvlite: Run, model: Path, tasks: Path, *more: object) -> None:
        self.kvlite, self.tasks = kvlite, tasks
        self.out = tasks.parent / "answers.jsonl"
        self.args = ["batch", tasks, "--out", self.out, "--model", model, *FLAGS, *more]

    def run(self, *more: object) -> Done:
        return self.kvlite(*self.args, *more)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]


@pytest.fixture
def job(kvlite: Run, model: Path, reports: Path) -> Job:
    return Job(kvlite, model, reports, "--questions", reports.parent / "questions.txt")


def test_answers_are_those_of_each_question_alone(
    job: Job, kvlite: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, best = list[int](), Planner.best

    def plans(self: Planner, tokens: int) -> Plan:
        planned.append(tokens)
        return best(self, tokens)

    monkeypatch.setattr(Planner, "best", plans)
    done = job.run("--json")
    summary = done.json()
    assert done.code == 0 and summary["answered"] == 9 and summary["documents"] == 3
    assert summary["together"] == 9 and summary["cut"] == 9
    longest = max(row["document_tokens"] for row in job.rows)  # with the chat template
    assert longest - 20 < planned[0] < longest
    assert {row["id"] for row in job.rows} == {
        f"{name}#{number}" for name in ("a.txt", "b.md", "c.txt") for number in (1, 2, 3)
    }
    for row in job.rows[2:4]:
        one = kvlite("ask", row["document"], row["question"], "--model", model, *FLAGS, "--json")
        assert one.json()["answer"] == row["answer"] and row["error"] is None
        assert row["finish_reason"] == "length" and row["metrics"]["together"] == 9
    counted = [row["document"] for row in job.rows if row["document_tokens"]]
    assert sorted(counted) == sorted({row["document"] for row in job.rows})  # each was read once
    read = sum(row["document_tokens"] + row["metrics"]["prompt_tokens"] for row in job.rows)
    assert summary["read_tokens"] == read


def test_rows_have_the_passages_they_came_from(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their pages."""

    def first(piece: Piece, *about: Any) -> Piece:
        begin = Source(replace(about[2][0], page_starts=(0, 12)), 12, 18)
        return replace(piece, sources=(begin,)) if piece.metrics.finish_reason else piece

    monkeypatch.setattr(together, "with_sources", first)
    assert job.run("-q").code == 0
    for row in job.rows:
        name = Path(row["document"]).name
        place = {"document": name, "page": 2, "where": "page 2", "start": 12, "end": 18}
        assert row["sources"] == [{**place, "text": "on the"}]


def test_answers_are_json_by_the_schema_in_a_file(job: Job, tmp_path: Path) -> None:
    schema = tmp_path / "color.json"
    schema.write_text(
        '{"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, '
        '"required": ["color"], "additionalProperties": false}'
    )
    flags = "--schema", schema, "--max-tokens", 90
    assert job.run(*flags, "-q").code == 0 and len(job.rows) == 9
    assert {json.loads(row["answer"])["color"] for row in job.rows} <= {"red", "green"}
    cut = job.run("--schema", schema, "--max-tokens", 2, "--out", tmp_path / "cut.jsonl", "-q")
    rows = [json.loads(line) for line in (tmp_path / "cut.jsonl").read_text().splitlines()]
    assert cut.code == 2 and {row["finish_reason"] for row in rows} == {"length"}
    assert all("cut at 2 tokens" in row["error"] and row["answer"] for row in rows)
    assert "there is no such file" in job.run("--schema", "nope.json").err
    schema.write_text('{"type": "colour"}')
    assert "--schema" in (refused := job.run(*flags)).err and refused.code == 2
    assert "Invalid type: colour" in " ".join(refused.err.split())


@pytest.mark.skipif(sys.platform != "linux", reason="names are UTF-8 elsewhere")
def test_names_that_are_no_utf_8_have_ids_of_their_own(job: Job) -> None:
    for name in (b"caf\xe9.txt", b"caf\xe8.txt"):
        (Path(os.fsdecode(os.path.join(os.fsencode(job.tasks), name)))).write_text("A crane.")
    assert job.run("-q").code == 0 and len(job.rows) == 15
    first = r"caf\udce8.txt#1"
    assert {row["id"] for row in job.rows} > {first, r"caf\udce9.txt#1"}
    assert next(row for row in job.rows if row["id"] == first)["document"].endswith(first[:-2])
    assert job.run("--json").json()["answered_before"] == 15


@pytest.mark.parametrize("moment", [4])
def test_it_goes_on_where_it_was_ended(
    job: Job, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a line."""
    add, answered = Writer.add, list[str]()

    def ends(self: Writer, row: Mapping[str, Any], task: Task) -> None:
        if len(answered) == moment:
            with job.out.open("ab") as file:
                file.write(b'{"id": "a.txt#1", "ans')
            raise KeyboardInterrupt
        add(self, row, task)
        answered.append(row["id"])

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "add", ends)
        assert job.run().code
    summary = job.run("--json").json()
    assert summary["answered_before"] == moment and summary["answered"] == 9 - moment
    assert [row["id"] for row in job.rows][:moment] == answered
    assert len({row["id"] for row in job.rows}) == len(job.rows) == 9


def test_an_interrupt_ends_between_rows(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Writer.add

    def interrupts(self: Writer, row: Mapping[str, Any], task: Task) -> None:
        add(self, row, task)
        if len(job.rows) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "add", interrupts)
        done = job.run()
    assert done.code == 130 and "3 rows answered, 6 left: the same command goes on" in done.err
    assert "3 answers ended at a limit: --max-tokens allows longer ones" in done.err
    assert job.run("--json").json()["answered"] == 6
    assert len({row["id"] for row in job.rows}) == len(job.rows) == 9


def test_what_fails_is_in_its_rows_and_is_tried_again(job: Job, reports: Path) -> None:
    long, picture = reports / "0.txt", reports / "d.png"
    long.write_text("why " * 4000)
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    done = job.run()
    errors = {row["id"]: row["error"] for row in job.rows if row["error"]}
    assert (
        done.code == 2
        and "9 rows answered, 6 with an error (--retry-errors tries them again)" in done.err
    )
    assert {*errors} == {f"{name}#{n}" for name in ("0.txt", "d.png") for n in (1, 2, 3)}
    assert "tokens do not fit this model" in errors["0.txt#1"]
    assert "d.png" in errors["d.png#2"] and len(job.rows) == 15
    assert job.run("--json").json()["answered"] == 0  # they are done, with an error
    long.write_text("It is short now, since somebody cut it.")
    again = job.run("--retry-errors", "--json")
    assert again.code == 2 and again.json()["answered"] == again.json()["failed"] == 3
    assert len({row["id"] for row in job.rows}) == len(job.rows) == 15
    assert {row["id"] for row in job.rows if row["error"]} == {f"d.png#{n}" for n in (1, 2, 3)}


def test_a_full_disk_ends_it_and_it_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, calls = os.fsync, list[int]()

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = job.run()
    assert done.code == 2 and "No space left on device" in done.err
    assert "the same command goes on from it" in done.err
    job.run("-q")
    assert len({row["id"] for row in job.rows}) == len(job.rows) == 9


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_rows_name_documents_from_their_own_folder(
    kvlite: Run, model: Path, reports: Path, kind: str
) -> None:
    short = '{"max_new_tokens": 2}' if kind == "csv" else {"max_new_tokens": 2}
    rows = [
        {"id": "1", "document": "reports/a.txt", "question": "Who sat?"},
        {"id": "2", "text": "Nobody was there.", "question": "Who was there?", "settings": short},
        {"id": "3", "document": "reports/a.txt", "question": "Where?"},
    ]
    tasks = reports.parent / f"tasks.{kind}"
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = [dict.fromkeys(("document", "text", "settings")) | row for row in rows]
        table[0]["settings"] = {"seed": 3}
        parquet.write_table(arrow.Table.from_pylist(table), tasks)
    with tasks.open("a", newline="") as file:
        if kind == "jsonl":
            file.write("\n".join(map(json.dumps, rows)))
        elif kind == "csv":
            made = csv.DictWriter(file, ["id", "document", "text", "question", "settings"])
            made.writeheader()
            made.writerows(rows)
    job = Job(kvlite, model, tasks)
    assert job.run("-q").code == 0
    assert [row["id"] for row in job.rows] == ["2", "1", "3"]  # the shorter one ends first
    assert all(row["metrics"]["together"] == 3 and row["answer"] for row in job.rows)
    assert [row["metrics"]["generated_tokens"] for row in job.rows] == [2, 4, 4]
    if kind == "parquet":
        out = reports.parent / "answers.parquet"
        assert job.run("--out", out, "-q").code == 0
        made = parquet.read_table(out).to_pylist()
        assert [(row["id"], row["answer"]) for row in made] == [
            (row["id"], row["answer"]) for row in job.rows
        ]
        assert json.loads(made[0]["metrics"])["generated_tokens"] == 2
        assert json.loads(made[0]["sources"]) == []


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (['{"id": 1, "document": "a.txt"}'], "line 1 has no question"),
        (['{"id": 1, "question": "Who?"}'], "line 1 has no document or text"),
        (['{"document": "a", "question": "Who?"}'], "line 1 has no id"),
        (['{"id": 1, "text": "a", "question": "Who?"}'] * 2, "line 2 has the id '1'"),
        (['{"id": 1, "text": "a", "document": "b", "question": "c"}'], "a document and a text"),
        (["", '{"id": 1'], "line 2 is no JSON"),
        (["[1]"], "line 1 is no JSON object"),
        (['{"id": 1, "text": 2.5, "question": "c"}'], "has 2.5 for its text"),
        ([""], "there are no rows"),
        (['{"id": 1, "text": "a", "question": "c", "settings": {"top_k": -1}}'], "1: top_k -1"),
        (
            ['{"id": 1, "text": "a", "question": "c", "settings": {"budget": 9}}'],
            "a row can have system",
        ),
        (['{"id": 1, "text": "a", "question": "c", "settings": "top_k"}'], "that are no JSON"),
        (['{"id": 1, "text": "a", "question": "c", "settings": [1]}'], "give an object"),
    ],
)
def test_bad_rows(
    refused: Refused, model: Path, tmp_path: Path, lines: list[str], named: str
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(lines))
    refused(["batch", tasks, "--out", tmp_path / "out.jsonl", "--model", model], named)
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_arguments(
    refused: Refused, model: Path, reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--out", tmp_path / "out.jsonl", "--model", model]
    refused(["batch", reports, *out], "there is no question", "--questions")
    refused(["batch", tmp_path / "none*", "--questions", "Who?", *out], "there is no document")
    refused(["batch", reports, "--questions", "asked.txt", *out], "asked.txt", "no such file")
    both = tmp_path / "both.csv"
    both.write_text("id,text,question\n1,some,Who?\n")
    refused(["batch", both, "--questions", "Who?", *out], "leave one of them out")
    commas = tmp_path / "commas.csv"
    commas.write_text("id,text,question\n1,some,Who, me?\n")
    refused(["batch", commas, *out], "line 2 has 4 fields for 3 columns", "in quotes")
    commas.write_text("id;text;question\n1;some;Who?\n")
    refused(["batch", commas, *out], "the columns id;text;question", "with commas")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"id,text\n\xff\xfe,\n")
    refused(["batch", binary, *out], "binary.csv", "UTF-8")
    monkeypatch.setitem(sys.modules, "ray", None)
    asked = ["batch", reports, "--questions", "Who?", *out]
    refused([*asked, "--ray", "auto"], "Ray Data", "kvlite[cluster]")


def test_output_of_something_else(job: Job, refused: Refused, tmp_path: Path) -> None:
    assert job.run("-q").code == 0
    before = job.out.read_bytes()
    refused([*job.args, "--max-tokens", "5"], "another job, of other settings")
    job.out.write_bytes(b"some notes\n" + before)
    refused(job.args, "line 1 is no answer of a job")
    for there in (b"some notes", before + b"some notes"):  # which is no row that was cut short
        job.out.write_bytes(there)
        refused(job.args, "is no answer of a job")
        assert job.out.read_bytes() == there
    job.out.write_bytes(before)
    for each in (tmp_path / "nowhere" / "out.jsonl", tmp_path):
        refused([*job.args, "--out", each], "--out")


def test_what_is_new_is_answered_and_nothing_else(
    job: Job, refused: Refused, reports: Path
) -> None:
    assert job.run("-q").code == 0
    before = job.rows
    (reports / "new.txt").write_text("The heron stood by the lake.")
    done = job.run("--questions", "How?", "--json").json()
    assert (done["answered"], done["answered_before"]) == (3 + 4, 9)
    assert job.rows[:9] == before and len({row["id"] for row in job.rows}) == 16
    questions = reports.parent / "questions.txt"
    questions.write_text(questions.read_text().replace("Who sat?", "Who stood?"))
    refused(job.args, "'a.txt#1' an answer to another question")


def test_requests_in_the_form_of_openai(
    kvlite: Run, refused: Refused, model: Path, tmp_path: Path
) -> None:
    said = "The cat sat on the mat. Who sat?"
    asked = {"messages": [{"role": "user", "content": said}], "max_tokens": 3, "model": "any"}
    told = {"role": "system", "content": [{"type": "text", "text": "Answer in rhymes."}]}
    rhymes = {**asked, "messages": [told, *asked["messages"]]}  # type: ignore[misc]
    tasks, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"

    def given(*bodies: dict[str, Any], **more: Any) -> list[object]:
        lines = ({"custom_id": f"r{n}", "body": body, **more} for n, body in enumerate(bodies))
        tasks.write_text("\n".join(map(json.dumps, lines)))
        return ["batch", tasks, "--out", out, "--model", model]

    assert kvlite(*given(asked, {**rhymes, "max_tokens": 5}), "-q").code == 0
    rows = {row["custom_id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 2 and all(row["error"] is None for row in rows.values())
    runner = library.load(str(model))
    for name, system, longest in (("r0", "", 3), ("r1", "Answer in rhymes.", 5)):
        talk = runner.conversation(system=system, max_new_tokens=longest)
        pieces = list(talk.stream(said))
        completion = ChatCompletion.model_validate(rows[name]["response"]["body"])
        (choice,) = completion.choices
        assert choice.message.content == "".join(piece.text for piece in pieces)
        assert completion.usage and completion.usage.completion_tokens == longest
        assert completion.usage.prompt_tokens == pieces[-1].metrics.prompt_tokens
    assert kvlite(*given(asked, rhymes), "--json").code == 2  # another request of the same id
    refused(given(asked, url="/v1/embeddings"), "line 1 asks for '/v1/embeddings'")
    refused(given({**asked, "n": 2}), "line 1: n, logprobs, tools and chat_template_kwargs")
    refused(given({**asked, "kvlite": {"budget": "9"}}), "kvlite.budget is the job's")
    refused(given({**asked, "messages": asked["messages"] * 2}), "a chat that goes on")
    refused([*given(asked), "--questions", "Who?"], "leave out --questions")


def test_python_rows(model: Path) -> None:
    rows = [
        {"id": at, "text": "The cat sat on the mat.", "question": q} for at, q in enumerate("ab")
    ]
    made = list(library.batch(rows, str(model), max_new_tokens=3))
    assert [each.id for each in made] == ["0", "1"] and made[0].answer and not made[0].error
    runner = library.load(str(model))
    again = library.batch(rows, runner, max_new_tokens=3)
    assert [each.answer for each in again] == [each.answer for each in made]
    wrong = {**rows[0], "id": "wrong", "settings": {"schema": "{"}}
    first, *rest = library.batch([wrong, *rows], runner, max_new_tokens=3)
    assert first.id == "wrong" and "schema" in str(first.error)
    assert [each.answer for each in rest] == [each.answer for each in made]
    with pytest.raises(library.KvliteError, match="row 0 has no question"):
        library.batch([{"id": "1", "text": "some"}], runner)
    odd: Any = [rows[0], "some"]
    with pytest.raises(library.KvliteError, match="row 1 is no row: each is a dict"):
        library.batch(odd, runner)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the job is forked")
def test_killed_at_any_moment(reports: Path, model: Path) -> None:
    """kill -9, again and again: every row once, and none that was there is answered again."""
    text = (reports / "a.txt").read_text()
    for number in range(12):
        (reports / f"{number}.txt").write_text(text)
    command = [sys.executable, "-m", "tests.cli.killing", str(model), str(reports.parent)]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}  # none that a fork would miss
    done = subprocess.run(command, env=threads, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"kills": 10, "rows": 45}
