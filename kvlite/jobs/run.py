"""Running a job: each document is read once, and questions are answered together."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.runner import Runner, open_runner
from kvlite.conversation.together import Question, ask_all
from kvlite.documents import Document, read_document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks, require_callbacks
from kvlite.errors import ContextError, KvliteError, ModelError, SettingError, Stopped, reason
from kvlite.jobs.answer import BatchAnswer, failed
from kvlite.jobs.tasks import Task, by_document, tasks_of
from kvlite.jobs.workers import Place, answered_by_workers
from kvlite.memory.device_budget import checkpoint_limit, ram_limit
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.chat_template import all_of, question_about, tokens_of
from kvlite.model.files import fingerprint

# A text without a name of its own, as the model is told.
UNNAMED = "text"


def batch(
    rows: Iterable[Mapping[str, Any]],
    model: str | Runner | None = None,
    *,
    callbacks: Callbacks = NO_CALLBACKS,
    **settings: Any,
) -> Iterator[BatchAnswer]:
    """Answer many questions about documents. Each document is read once; its questions are each
    answered as if it alone were asked, in the same decode steps as far as memory allows.

    Args:
        rows: each with an `id` of its own, a `question`, and a `document` (a file) or a `text`; or
            also `settings` of its answer, such as {"max_new_tokens": 20}.
        model: as of `load`, or a loaded one.
        callbacks: `cancel` ends it; answers that have begun are lost.
        settings: as of `load`.

    Returns:
        Answers as they end, roughly in the order of the documents. What is wrong with one document
        or question is in its `error`; the others go on.

    Raises:
        SettingError: a row lacks something, or a setting is wrong; at once.
        ModelError: the model cannot be found, opened or run; at once.
    """
    require_callbacks(callbacks)
    tasks = tasks_of(rows)
    if isinstance(model, Runner):
        return answered(model, tasks, callbacks, **settings)
    if model is not None:
        settings["model"] = model
    return answered(open_for(Settings().replace(settings), tasks), tasks, callbacks)


def open_for(
    settings: Settings, tasks: Iterable[Task], notify: Callable[[str], None] | None = None
) -> Runner:
    """`open_runner`, planned for the longest document, or where that does not fit, as if nobody
    knew: its rows will say so."""
    text = longest_text(tasks)

    def reads(tokenizer: Any, max_context: int) -> int:
        try:
            return tokens_of(tokenizer, text, max_context)
        except ContextError:
            return max_context

    if text:
        try:
            return open_runner(settings, notify, reads)
        except SettingError:
            pass  # also if a setting is wrong, which is found again
    return open_runner(settings, notify)


def largest(tasks: Iterable[Task]) -> list[Task]:
    """Of each format, the task with the largest document."""
    found: dict[str, tuple[int, Task]] = {}
    for task in tasks:
        path = Path(task.document)
        try:
            size = path.stat().st_size if task.document else len(task.text + task.question)
        except OSError:  # its rows will say so
            continue
        format = path.suffix.lower()
        if format not in found or size > found[format][0]:
            found[format] = size, task
    return [task for _, task in found.values()]


def longest_text(tasks: Iterable[Task]) -> str:
    """What is said about the longest of the largest documents, without the template and what OCR,
    which takes minutes, would read; "" if none can be read."""
    said = [""]
    for task in largest(tasks):
        with suppress(KvliteError):
            said.append(said_of(documents_of(task), task))
    return max(said, key=len)


def answered(
    runner: Runner, tasks: Sequence[Task], callbacks: Callbacks, **settings: Any
) -> Iterator[BatchAnswer]:
    """Answer tasks; a document is read once, in their order, as soon as there is room for its
    answers beside those that come. Ends early if `callbacks.cancel` is set."""
    return answered_as_they_come(runner, by_document(tasks), callbacks, **settings)


def answered_as_they_come(
    runner: Runner, shares: Iterable[Sequence[Task]], callbacks: Callbacks, **settings: Any
) -> Iterator[BatchAnswer]:
    """As `answered`, of one document's tasks at a time, taken when there is room for them."""
    asked, refused = list[_Asked](), list[BatchAnswer]()
    conversations = _conversations(runner, shares, callbacks, settings, asked, refused)
    for index, heard in ask_all(conversations, callbacks):
        yield from refused
        refused.clear()
        if (answer := asked[index].hear(heard)) is not None:
            yield answer
    yield from refused


def _conversations(
    runner: Runner,
    shares: Iterable[Sequence[Task]],
    callbacks: Callbacks,
    settings: Mapping[str, Any],
    asked: "list[_Asked]",
    refused: list[BatchAnswer],
) -> Iterator[tuple[Conversation, EngineConfig, list[Question]]]:
    """Each document's, read as its turn comes, and the questions about it, which are added to
    those `asked`; what cannot be read is left out, and its answers are `refused`."""
    for tasks in shares:
        if callbacks.cancelled:
            return
        try:
            limit, reading = runner.text_limit, runner.settings.reading
            documents = documents_of(tasks[0], limit, callbacks.cancel, **reading)
            system = {k: v for k, v in tasks[0].settings.items() if k == "system"}
            talk = runner.conversation(**{**settings, **system})
            if documents:
                talk.documents = tuple(documents)
                talk.read_ahead(all_of(documents), callbacks=callbacks)
        except Stopped:
            return
        except KvliteError as error:
            refused += [failed(task, error) for task in tasks]
            continue
        said = [said_of(documents, task) for task in tasks]
        asked += [_Asked(task) for task in tasks]
        asked[-len(tasks)].document_tokens = len(talk.token_ids)
        own = [task.settings for task in tasks]
        yield talk, talk.config, [*zip(said, own, strict=True)]


def documents_of(
    task: Task, limit: int | None = None, cancel: Event | None = None, **reading: Any
) -> list[Document]:
    """What a task is about, if anything; args and errors are those of `read_document`."""
    if task.document:
        return [read_document(task.document, limit=limit, cancel=cancel, **reading)]
    return [Document(UNNAMED, task.text, ())] if task.text else []


def said_of(documents: Sequence[Document], task: Task) -> str:
    """What the model is told of a task."""
    return question_about(documents, task.question) if documents else task.question


@dataclass
class _Asked:
    task: Task
    said: str = ""
    reasoning: str = ""
    document_tokens: int = 0

    def hear(self, heard: Piece | KvliteError) -> BatchAnswer | None:
        if isinstance(heard, KvliteError):
            return failed(self.task, heard)
        self.said += heard.text
        self.reasoning += heard.reasoning
        reason = heard.finish_reason
        if reason is None or reason == "interrupted":
            return None
        metrics = heard.metrics
        own = self.task.id, self.task.document, self.task.question
        made = *own, self.said, reason, metrics, metrics.failure or None, self.document_tokens
        sources = tuple(each.to_json() for each in heard.sources)
        return BatchAnswer(*made, sources, self.reasoning)


class Engine:
    """A loaded model that answers all questions about a document, and then about the next one, in a
    process of its own. Its weights must have a fingerprint, and it is planned for the `longest`
    tasks."""

    def __init__(self, settings: Settings, weights: str, longest: Sequence[Task]) -> None:
        self.runner = open_for(settings, longest)
        if fingerprint(self.runner.model_path) != weights:
            raise ModelError(
                f"the model in {self.runner.model_path} on {platform.node()} is another one "
                "than where the job was begun: copy that"
            )

    @property
    def changes(self) -> Sequence[str]:
        """What its plan changed, in sentences."""
        return self.runner.plan.changes if self.runner.plan else ()

    def answered(
        self, shares: Iterable[Sequence[Task]], callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[BatchAnswer]:
        """Answer tasks about one document at a time. Nothing is raised, which would end the whole
        job: tasks that were left have an error."""
        left = dict[str, Task]()

        def taken() -> Iterator[Sequence[Task]]:
            for share in shares:
                left.update((task.id, task) for task in share)
                yield share

        try:
            for answer in answered_as_they_come(self.runner, taken(), callbacks):
                del left[answer.id]
                yield answer
        except Exception as error:
            yield from (failed(task, ModelError(reason(error))) for task in left.values())


def answered_on_devices(
    devices: Sequence[torch.device],
    settings: Settings,
    weights: str,
    tasks: Sequence[Task],
    callbacks: Callbacks,
) -> Iterator[BatchAnswer]:
    """As `answered`, on several devices; `weights` is as of `Engine`, other args and errors are
    those of `answered_by_workers`."""
    settings, longest = _shared(settings, len(devices)), largest(tasks)
    places = [
        Place(
            str(device),
            (settings.replace({"device": device.type}), weights, longest),
            _environment(device, devices),
        )
        for device in devices
    ]
    return answered_by_workers(Engine, places, tasks, callbacks)


def _shared(settings: Settings, count: int) -> Settings:
    auto = {"recall_limit": ram_limit(None, held=0), "checkpoint_limit": checkpoint_limit(None)}
    shares = {name: f"{limit // count}B" for name, limit in auto.items()}
    return settings.replace(
        {name: share for name, share in shares.items() if getattr(settings, name) == "auto"}
    )


def _environment(device: torch.device, devices: Sequence[torch.device]) -> dict[str, str]:
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = device.index or 0
        return {"CUDA_VISIBLE_DEVICES": visible[number] if visible[0] else str(number)}
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    return {"OMP_NUM_THREADS": str(max(1, threads // devices.count(device)))}
