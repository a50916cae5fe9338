"""`kvlite batch`: many questions about many documents, each answered once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvlite.cli import BAD_INPUT, INTERRUPTED
from kvlite.cli.console import print_json
from kvlite.cli.opening import load_by, require_out
from kvlite.cli.options import AsJson, Quiet, with_resolved
from kvlite.cli.screen import console, stop_on_interrupt
from kvlite.config.resolve import Resolved
from kvlite.config.settings import Settings
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SettingError
from kvlite.jobs.output import Written, job_of, publish, record_of, reserved, writing
from kvlite.jobs.rows import READERS, is_batch_file, pyarrow
from kvlite.jobs.tasks import Task, questions_in, tasks_in
from kvlite.model.files import fingerprint
from kvlite.model.source import find_model, require_model

if TYPE_CHECKING:
    import torch

    from kvlite.jobs.answer import BatchAnswer

# Tokens of an answer where nothing says more: nobody watches, and a model that repeats itself would
# otherwise fill the context for each row.
_LONGEST = 256

Answers = Callable[[Sequence[Task], Callbacks], "Iterator[BatchAnswer]"]
RowOf = Callable[["BatchAnswer"], dict[str, Any]]

Tasks = Annotated[
    str,
    typer.Argument(
        help="a folder or a glob of documents; or a .jsonl, .csv or .parquet file with id, "
        "question, and document (a file) or text, perhaps settings; or OpenAI's batch file"
    ),
]
Out = Annotated[
    str,
    typer.Option(
        help="the .jsonl file that answers are added to; or a .parquet file, made from "
        "FILE.parquet.jsonl whenever the command ends"
    ),
]
Questions = Annotated[
    list[str] | None,
    typer.Option(help="a question about each document, or a file with one a line; repeatable"),
]
RetryErrors = Annotated[
    bool, typer.Option("--retry-errors", help="try rows again that have an error")
]
Cluster = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="answer on a Ray cluster: `auto` for the one this machine is in, host:port, or "
        "`local`; documents are where every node finds them",
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        metavar="DEVICES",
        help="one engine on each of these devices of this machine, all with the same queue of "
        "documents: `all` CUDA devices, or some, such as cuda:0,cuda:1",
    ),
]


@with_resolved
def batch(
    resolved: Resolved,
    tasks: Tasks,
    out: Out,
    questions: Questions = None,
    retry_errors: RetryErrors = False,
    ray: Cluster = "",
    devices: Devices = "",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Answer many questions about many documents.

    Each document is read once. Its questions are each answered as if it alone were asked, in the
    same decode steps as others, of other documents too, as far as memory allows. Every answer is on
    disk as soon as it has ended: after Ctrl-C, a crash or a power cut the same command goes on
    where it was; with more documents or questions than then, it answers what is new. A document
    that cannot be read has an error in its rows, and the others go on; rows that lack something are
    refused before anything is read. A document that changed since is not noticed.

    Of OpenAI's batch file, requests for /v1/chat/completions are answered, in OpenAI's form.

    An answer has at most 256 tokens unless --max-tokens or its row says more. How many were cut is
    said at the end, and in each row (finish_reason: length).

    Exit codes: 0; 2 where anything was refused or a row has an error; 130 after Ctrl-C.

    Examples:

      kvlite batch reports/ --questions questions.txt --out answers.jsonl

      kvlite batch "reports/*.pdf" --questions "Who signed?" --questions "When?" --out answers.jsonl

      kvlite batch tasks.csv --out answers.jsonl --retry-errors

      kvlite batch bills/ --questions "What is to be paid?" --schema bill.json --out bills.jsonl
    """
    settings = resolved.settings
    if resolved.origins["max_new_tokens"].kind == "default":
        settings = settings.replace({"max_new_tokens": _LONGEST})
    path, job = record_of(Path(out)), job_of(settings)
    asked, row_of = _asked(tasks, questions or (), settings, (out, path))
    require_out(out)
    require_model(settings.model)
    if path != Path(out):
        pyarrow()
    where = _devices(devices, settings, ray)
    screen = console(quiet)
    with reserved(path), ExitStack() as stack:
        written = Written.of(path)
        written.require(job, asked, path)  # before the model is loaded
        done = written.done.keys() - (written.failed if retry_errors else ())
        answers: Answers | None = None  # where nothing is left
        if done >= {task.id for task in asked}:
            job["model"] = fingerprint(find_model(settings.model))
        else:
            engine = _engine(settings, asked, ray, where, screen)
            job["model"], answers = stack.enter_context(engine)
        writer = stack.enter_context(writing(path, job, asked, retry=retry_errors))
        cancel = stack.enter_context(stop_on_interrupt())
        left = {task.id: task for task in asked if task.id not in writer.written.done}
        summary = Summary.of(asked, writer.written)
        shown = _Progress(screen, summary.rows, summary.before)
        callbacks = Callbacks(notify=shown.note, cancel=cancel)
        with shown.bar:
            for answer in answers([*left.values()], callbacks) if answers else ():
                writer.add(row_of(answer), left[answer.id])
                summary.add(answer)
                shown.advance()
        stopped = cancel.is_set() and summary.left > 0
        publish(path, Path(out))
    summary.print(screen, out, as_json=as_json)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if summary.failed:
        raise typer.Exit(BAD_INPUT)


def _asked(
    place: str, questions: Sequence[str], settings: Settings, outs: Sequence[str | Path]
) -> tuple[list[Task], RowOf]:
    if not is_batch_file(place):
        return tasks_in(place, questions_in(questions), outs), methodcaller("to_json")
    if questions:
        raise SettingError(
            f"{place} has requests, with questions of their own: leave out --questions"
        )
    from kvlite.server.batch_file import answer_line, tasks_of_requests

    asked = tasks_of_requests(READERS[".jsonl"](place), settings)
    return asked, partial(answer_line, model=settings.model)


def _devices(text: str, settings: Settings, ray: str) -> "Sequence[torch.device]":
    if not text:
        return ()
    for other in ("--ray",) * bool(ray) + ("--device",) * (settings.device != "auto"):
        raise SettingError(f"--devices {text} and {other} both say where: leave one of them out")
    from kvlite.model.devices import choose_devices

    return choose_devices(text, "--devices")


@contextmanager
def _engine(
    settings: Settings,
    tasks: Sequence[Task],
    ray: str,
    devices: "Sequence[torch.device]",
    screen: Console,
) -> Iterator[tuple[str, Answers]]:
    if ray:
        from kvlite.jobs.cluster import answered_on_cluster, connected

        with screen.status("Connecting to the cluster") as status, connected(ray):
            weights = fingerprint(find_model(settings.model, status.update))
            status.stop()
            yield weights, partial(answered_on_cluster, settings, weights)
        return
    if devices:
        from kvlite.jobs.run import answered_on_devices

        with screen.status("Looking for the model") as status:
            weights = fingerprint(find_model(settings.model, status.update))
        yield weights, partial(answered_on_devices, devices, settings, weights)
        return
    from kvlite.jobs.run import answered, open_for

    runner = load_by(partial(open_for, settings, tasks), screen)
    yield fingerprint(runner.model_path), partial(answered, runner)


class _Progress:
    def __init__(self, screen: Console, total: int, done: int) -> None:
        columns = (
            TextColumn("Answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(
            *columns, console=screen, transient=True, disable=not screen.is_terminal or screen.quiet
        )
        self._task = self.bar.add_task("", total=total, completed=done, rate="")
        self._begun, self._came = perf_counter(), 0
        self._told: set[str] = set()

    def advance(self) -> None:
        self._came += 1
        rate = self._came / (perf_counter() - self._begun) * 3600
        self.bar.update(self._task, advance=1, rate=f"{rate:,.0f} an hour")

    def note(self, note: str) -> None:
        if note not in self._told:
            self._told.add(note)
            self.bar.console.print(f"Note: {note}", style="yellow")


@dataclass
class Summary:
    """What a job came to.

    Attributes:
        rows, documents: of all tasks.
        before: rows that were there already.
        failed: rows with an error, those that were there included.
        written: rows that came since, of which `answered` have no error.
        cut: those of them that a limit ended.
        together: the most answers that came in the same decode steps.
    """

    rows: int
    documents: int
    before: int
    failed: int
    written: int = 0
    answered: int = 0
    cut: int = 0
    together: int = 0
    read_tokens: int = 0
    generated_tokens: int = 0
    begun: float = field(default_factory=perf_counter)

    @classmethod
    def of(cls, asked: Sequence[Task], written: Written) -> "Summary":
        """Of what was asked, when nothing is written beside what was there."""
        ids = {task.id for task in asked}
        documents = len({(task.document, task.text) for task in asked})
        return cls(len(asked), documents, len(ids & written.done.keys()), len(ids & written.failed))

    @property
    def left(self) -> int:
        """Rows that nobody has answered."""
        return self.rows - self.before - self.written

    def add(self, answer: "BatchAnswer") -> None:
        """Count a row that was written."""
        self.written += 1
        self.answered += answer.error is None
        self.failed += answer.error is not None
        self.cut += answer.error is None and answer.finish_reason == "length"
        self.read_tokens += answer.document_tokens
        if answer.metrics is not None:
            self.read_tokens += answer.metrics.prompt_tokens
            self.generated_tokens += answer.metrics.generated_tokens
            self.together = max(self.together, answer.metrics.together)

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        seconds = perf_counter() - self.begun
        return {
            "rows": self.rows,
            "answered_before": self.before,
            "answered": self.answered,
            "failed": self.failed,
            "cut": self.cut,
            "left": self.left,
            "documents": self.documents,
            "together": self.together,
            "read_tokens": self.read_tokens,
            "generated_tokens": self.generated_tokens,
            "seconds": seconds,
            "generated_tokens_per_s": self.generated_tokens / seconds,
            "rows_per_hour": 3600 * self.answered / seconds,
        }

    def print(self, screen: Console, out: str, *, as_json: bool) -> None:
        """Say how it went."""
        made = self.to_json()
        if as_json:
            print_json({**made, "out": out})
            return
        before = f", {self.before:,} there before" if self.before else ""
        failed = (
            f", {self.failed:,} with an error (--retry-errors tries them again)"
            if self.failed
            else ""
        )
        left = f", {self.left:,} left: the same command goes on" if self.left else ""
        rate = (
            f" {counted(self.documents, 'document')}, {self.read_tokens:,} tokens read, "
            f"{self.generated_tokens:,} generated, {made['generated_tokens_per_s']:,.1f} a second; "
            f"{made['rows_per_hour']:,.0f} rows an hour, up to {self.together:,} at once."
        )
        said = f"{out}: {counted(self.answered, 'row')} answered{before}{failed}{left}."
        screen.print(said + (rate if self.generated_tokens else ""))
        if self.cut:
            screen.print(
                f"{counted(self.cut, 'answer')} ended at a limit: --max-tokens allows longer ones, "
                "as far as the model's context goes."
            )


def counted(number: int, thing: str) -> str:
    """So many of a thing, in words."""
    return f"{number:,} {thing}{'s' * (number != 1)}"
