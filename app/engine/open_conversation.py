"""What pages may have done with a conversation, whoever answers in it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvlite.conversation.session import Message
from kvlite.documents import Document
from kvlite.engine.callbacks import Callbacks
from kvlite.web.work import Shown, Work

from ..storage.record import Record

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
