"""What pages may have done with a conversation, whoever answers in it: a model here or a server."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvlite.config.settings import Settings
from kvlite.conversation.message import Message
from kvlite.documents import Document
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SnapshotError
from kvlite.web.work import Shown, Work

from ..storage.record import Record
from ..storage.store import ConversationStore

Begin = Callable[[Callbacks], Iterator[Any]]
"""Starts an answer, which comes in pieces."""


class Talk(Protocol):
    """What is said, and going back in it, as `Session` has it. What cannot be done raises
    SettingError.

    Attributes:
        changed: the settings that differ from those it began with.
    """

    changed: dict[str, Any]

    @property
    def messages(self) -> list[Message]:
        """The user's messages, in order."""
        ...

    def message(self, number: int | None) -> tuple[int, Message]:
        """A message and its number, counted from 1; None stands for the last one."""
        ...

    def read(self, documents: Sequence[Document], callbacks: Callbacks) -> bool:
        """Take documents for the next message; whether they were read."""
        ...

    def take_back(self, names: Sequence[str], callbacks: Callbacks) -> None:
        """Forget documents that wait, by their names."""
        ...

    def say(self, text: str) -> Begin:
        """Answer a new message."""
        ...

    def regenerate(self, **settings: Any) -> Begin:
        """Answer the last message again, with settings for this answer alone."""
        ...

    def continue_answer(self) -> Begin:
        """Go on with the last answer."""
        ...

    def edit(self, number: int, text: str) -> Begin:
        """Answer message `number` in other words, about the same documents."""
        ...

    def check(self) -> Begin:
        """Answer the last message from everything."""
        ...

    def undo(self, callbacks: Callbacks) -> None:
        """Go back before the last message; its documents wait for the next one."""
        ...

    def branch(self, number: int, callbacks: Callbacks) -> None:
        """Go back to just after the answer to message `number`."""
        ...

    def switch(self, number: int, callbacks: Callbacks) -> None:
        """Go to a branch, counted from 1."""
        ...

    def change(self, **values: Any) -> None:
        """Change settings, from the next message on."""
        ...


class OpenConversation(Protocol):
    """A conversation that can be gone on with."""

    record: Record

    @property
    def session(self) -> Talk:
        """What is said in it."""
        ...

    def answer(self, work: Work, begin: Begin, reading_s: float = 0.0) -> None:
        """Show an answer as it comes, and keep its account. Reading its documents took
        `reading_s`."""

    def keep(self) -> None:
        """Write it to disk; raises SnapshotError if it cannot be."""

    def glance(self, shown: Shown) -> None:
        """Called each time that work on it shows something."""

    def look(self) -> None:
        """Called once that work has ended."""


ConversationTask = Callable[[OpenConversation, Work], Any]


class Host(Protocol):
    """What answers; the engine's thread calls its methods.

    Attributes:
        settings: what answers by them, and conversations begin with.
    """

    settings: Settings

    @property
    def pause(self) -> float:
        """Seconds between two looks at an answer."""
        ...

    def load(self, settings: Settings, work: Work) -> str:
        """Answer by another model from now on; a sentence on the memory that is free now."""
        ...

    def opened(self, store: ConversationStore, id: str, work: Work) -> OpenConversation:
        """A conversation, to work on."""
        ...


def work_on(
    host: Host, store: ConversationStore, id: str, title: str, task: ConversationTask, work: Work
) -> Record:
    """Work on a conversation, which is open then and on disk afterwards. The message that is sent
    with the work is its draft until it is answered; `title` is shown once it is open."""
    now = host.opened(store, id, work)
    now.record.draft = work.request.text or now.record.draft
    work.on_show = now.glance
    work.begin(title)
    try:
        task(now, work)
    except BaseException:
        if store.has(id):  # a message that was refused begins no conversation
            with suppress(SnapshotError):  # the first error matters more
                now.keep()
        raise
    else:
        now.keep()
    finally:
        work.on_show = None
        now.look()
    return now.record
