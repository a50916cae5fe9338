"""What is done for a conversation, and how it looks meanwhile."""

from dataclasses import dataclass, field, replace

from ..storage.record import Record
from .work import Work


@dataclass(frozen=True)
class JobRequest:
    """What someone sent, as it is shown before it is said.

    Attributes:
        text: the message, "" where one is answered that was said before, or none is.
        above: how many of the conversation's messages stay; None where all do.
        files: those that go with the message, until they are read.
        branch: the one that is gone to, counted from 1.
        check: whether the last answer is checked.
    """

    text: str = ""
    above: int | None = None
    files: list[str] = field(default_factory=list)
    branch: int | None = None
    check: bool = False

    @property
    def answered(self) -> bool:
        """Whether an answer to a message of the conversation comes of it."""
        return bool(self.text) or self.above is not None


NOTHING = JobRequest()


@dataclass(frozen=True)
class Job:
    """What is done for a conversation, or was last.

    Attributes:
        work: it.
        sent: what it is done with.
    """

    work: Work
    sent: JobRequest

    @property
    def ended(self) -> bool:
        """Whether nothing is done any more."""
        return self.work.shown.ended


def as_shown(record: Record, job: Job | None) -> Record:
    """A conversation as people see it: what is being answered is its draft, and what that takes the
    place of is gone."""
    if job is None or job.ended:
        return replace(record, draft="")
    return replace(record, said=record.said[: job.sent.above], draft=job.sent.text)
