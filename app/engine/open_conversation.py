"""What pages may have done with a conversation, whoever answers in it: a model here or a server."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from kvlite.config.settings import Settings
from kvlite.conversation.session import Session
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SnapshotError
from kvlite.web.server_talk import ServerTalk
from kvlite.web.work import Shown, Work

from ..storage.record import Record
from ..storage.store import ConversationStore

Begin = Callable[[Callbacks], Iterator[Any]]
"""Starts an answer, which comes in pieces."""


Talk = Session | ServerTalk
"""What is said, and going back in it. What cannot be done raises SettingError."""


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
        beside: whether it answers in several conversations at once.
    """

    settings: Settings
    beside: bool

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
