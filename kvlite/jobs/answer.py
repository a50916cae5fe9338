"""The answer to a row of a job, or why there is none."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlite.errors import KvliteError, ModelError, sentence
from kvlite.jobs.tasks import Task, printable

if TYPE_CHECKING:
    from kvlite.conversation.endings import FinishReason
    from kvlite.conversation.metrics import GenerationMetrics

# How often a document may end the process that answers it, by crashing it or with its node.
TRIES = 3


@dataclass(frozen=True)
class BatchAnswer:
    """The answer to one row.

    Attributes:
        id, document, question: of the row; `document` is "" if it came with its text.
        answer: its text, as far as it came.
        finish_reason: why it ended; None if there is no answer.
        metrics: what it was made from; None if there is no answer.
        error: why there is none, or only a part, in a sentence.
        document_tokens: of its document, if it is the first one asked about that: they were read
            once for all. 0 if the document was read with each question.
        sources: the passages of the document that it came from, with their pages, best first, as
            `Source.to_json` says them.
        reasoning: what was thought before the answer.
    """

    id: str
    document: str
    question: str
    answer: str = ""
    finish_reason: "FinishReason | None" = None
    metrics: "GenerationMetrics | None" = None
    error: str | None = None
    document_tokens: int = 0
    sources: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON can hold them; `reasoning` only where there is some."""
        metrics = None if self.metrics is None else self.metrics.to_json()
        made = {**vars(self), "document": printable(self.document), "metrics": metrics}
        if not self.reasoning:
            del made["reasoning"]
        return made


def failed(task: Task, error: KvliteError) -> BatchAnswer:
    """The answer to a task that has none."""
    return BatchAnswer(task.id, task.document, task.question, error=sentence(error))


def lost(task: Task, look: str) -> BatchAnswer:
    """The answer to a task about a document that has ended too many processes; `look` says where
    the reason may be."""
    return failed(
        task,
        ModelError(
            f"the process that was to answer it ended {TRIES} times, each time without a word "
            f"(out of memory, a crash, a lost node): {look}"
        ),
    )
