"""An open conversation, answered by the model here or by a server."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, Self, TypeVar

from kvlite.conversation.library import Library
from kvlite.conversation.record import Record, StoredMessage
from kvlite.conversation.session import Session
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import KvliteError, SnapshotError
from kvlite.web.server_talk import ServerTalk
from kvlite.web.work import Shown, Work

Begin = Callable[[Callbacks], Iterator[Any]]
"""Starts an answer, which comes in pieces."""

Talk = TypeVar("Talk", Session, ServerTalk)


class OpenConversation(ABC, Generic[Talk]):
    """A conversation, and what is kept of it.

    Attributes:
        session: what is said in it, and going back. What cannot be done raises SettingError.
        kept: whether all of it is on disk, too.
    """

    # What becomes of it where it cannot be written: `name` and `error` are filled in.
    unwritten: ClassVar[str]

    def __init__(self, store: Library, record: Record, session: Talk) -> None:
        self.store, self.record = store, record
        self.session: Talk = session
        self.kept = True

    @abstractmethod
    def _said(self) -> tuple[Sequence[list[StoredMessage]], int]:
        """What was said on each branch, and the index of the current one."""

    @abstractmethod
    def _write(self) -> None:
        """Write what it goes on from."""

    def glance(self, shown: Shown) -> None:
        """Called each time that work on it shows something."""

    def look(self) -> None:
        """Called once that work has ended."""

    def do(self, title: str, task: Callable[[Self, Work], Any], work: Work) -> Record:
        """Work on it; it is on disk afterwards. The message that is sent with the work is its draft
        until it is answered; `title` is shown meanwhile."""
        self.record.draft = work.request.text or self.record.draft
        work.on_show = self.glance
        work.begin(title)
        writer = self.store.hold(self.record.id, self.record.title)
        try:
            task(self, work)
        except BaseException:
            if self.store.has(self.record.id):  # a message that was refused begins no conversation
                with suppress(SnapshotError):  # the first error matters more
                    self.keep()
            raise
        else:
            self.keep()
        finally:
            work.on_show = None
            writer.release()
            self.look()
        return self.record

    def keep(self, name: str = "this conversation") -> None:
        """Write it to disk. The record comes last: so what answers has all that people see,
        whenever the program ends.

        Raises SnapshotError if it cannot be written. Others may read the `name` in that error."""
        record, store = self.record, self.store
        self.kept = False
        self._update(record)
        try:
            with store.changing(record.id) as kept:  # in which nobody deletes it
                store.place(record.id).mkdir(parents=True, exist_ok=True, mode=0o700)
                if kept.is_document:
                    store.begin_beside(kept, record.name)
                self._write()
                kept.name = kept.name or record.name  # it may have been renamed
                self._update(kept)
        except (KvliteError, OSError) as error:
            if store.is_gone(record.id):
                return
            raise SnapshotError(self.unwritten.format(name=name, error=error)) from error
        self.record, self.kept = kept, True

    def _update(self, record: Record) -> None:
        (said, current), session = self._said(), self.session
        record.draft, record.changed = self.record.draft, dict(self.record.changed)
        record.made_by = ""
        record.update(said, current, session.given, [each.name for each in session.waiting])
