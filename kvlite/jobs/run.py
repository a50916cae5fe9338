"""Running a job: each document is read once, and its questions are answered together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import FinishReason, GenerationMetrics
from kvlite.conversation.runner import Runner, load
from kvlite.documents import Document, read_document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks, require_callbacks
from kvlite.errors import KvliteError, Stopped, sentence
from kvlite.jobs.tasks import Task, tasks_of
from kvlite.model.chat_template import all_of, question_about
from kvlite.model.text_limit import text_limit

# A text without a name of its own, as the model is told.
UNNAMED = "text"


@dataclass(frozen=True)
class BatchAnswer:
    """The answer to one row.

    Attributes:
        id, document, question: of the row; `document` is "" if it came with its text.
        answer: its text, as far as it came.
        finish_reason: why it ended; None if there is no answer.
        metrics: what it was made from; None if there is no answer.
        error: why there is none, or only a part, in a sentence.
        document_tokens: of its document, if it is the first one answered about that: they were read
            once for all. 0 if the document was read with each question.
    """

    id: str
    document: str
    question: str
    answer: str = ""
    finish_reason: FinishReason | None = None
    metrics: GenerationMetrics | None = None
    error: str | None = None
    document_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        metrics = None if self.metrics is None else self.metrics.to_json()
        return {**vars(self), "metrics": metrics}


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
        rows: each with an `id` of its own, a `question`, and a `document` (a file) or a `text`.
        model: as of `load`, or a loaded one.
        callbacks: `cancel` ends it; answers that have begun are lost.
        settings: as of `load`.

    Returns:
        Answers as they end, document by document. What is wrong with one document or question is in
        its `error`; the others go on.

    Raises:
        SettingError: a row lacks something, or a setting is wrong; at once.
        ModelError: the model cannot be found, opened or run; at once.
    """
    require_callbacks(callbacks)
    tasks = tasks_of(rows)
    runner = model if isinstance(model, Runner) else load(model, **settings)
    chosen = settings if isinstance(model, Runner) else {}
    return answered(runner, tasks, callbacks, **chosen)


def answered(
    runner: Runner, tasks: Sequence[Task], callbacks: Callbacks, **settings: Any
) -> Iterator[BatchAnswer]:
    """Answer tasks; those about one document are read and answered together, in the order of the
    documents. Ends early if `callbacks.cancel` is set."""
    limit = text_limit(runner.tokenizer, runner.shape.max_context)
    for group in by_document(tasks):
        path = group[0].document
        try:
            document = Document(UNNAMED, group[0].text, ())
            if path:
                document = read_document(path, limit=limit, cancel=callbacks.cancel)
            talk = runner.conversation(**settings)
            talk.documents = (document,)
            talk.read_ahead(all_of([document]), callbacks=callbacks)
        except Stopped:
            return
        except KvliteError as error:
            yield from (failed(task, error) for task in group)
            continue
        yield from _about(talk, document, group, callbacks)
        if callbacks.cancel is not None and callbacks.cancel.is_set():
            return


def by_document(tasks: Iterable[Task]) -> list[list[Task]]:
    """Tasks about the same document together, in the order of the documents."""
    groups: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.document, task.text), []).append(task)
    return [*groups.values()]


def _about(
    talk: Conversation, document: Document, tasks: Sequence[Task], callbacks: Callbacks
) -> Iterator[BatchAnswer]:
    """The answers to all questions about a document that was read."""
    texts = [question_about([document], task.question) for task in tasks]
    read, said, left = len(talk.token_ids), [""] * len(tasks), dict(enumerate(tasks))
    try:
        for index, heard in talk.ask_each(texts, callbacks=callbacks):
            task = tasks[index]
            if isinstance(heard, KvliteError):
                yield failed(left.pop(index), heard)
                continue
            said[index] += heard.text
            reason, metrics = heard.metrics.finish_reason, heard.metrics
            if reason is None or reason == "interrupted":
                continue
            del left[index]
            error = metrics.notes[-1] if reason == "memory" else None
            own = task.id, task.document, task.question
            yield BatchAnswer(*own, said[index], reason, metrics, error, read)
            read = 0
    except Stopped:
        return
    except KvliteError as error:
        yield from (failed(task, error) for task in left.values())


def failed(task: Task, error: KvliteError) -> BatchAnswer:
    """The answer to a task that has none."""
    return BatchAnswer(task.id, task.document, task.question, error=sentence(error))
