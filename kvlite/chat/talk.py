"""What a chat needs of a conversation."""

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any, Protocol

from kvlite.cache import KVCache
from kvlite.engine.prefill import Progress
from kvlite.ledger import Piece
from kvlite.model.load import LoadedModel
from kvlite.offload import Tier
from kvlite.settings import Settings
from kvlite.turn import Notify


class Branch(Protocol):
    """A path of a conversation."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """Role and content of each."""
        ...

    @property
    def current(self) -> bool:
        """Whether the conversation is on it."""
        ...


class Talk(Protocol):
    """A `Conversation`, with its ways back."""

    model: LoadedModel
    cache: KVCache
    tier: Tier | None
    settings: Settings
    messages: list[dict[str, str]]

    @property
    def branches(self) -> Sequence[Branch]:
        """Paths that were left, and the current one."""
        ...

    @property
    def checkpoint_bytes(self) -> int:
        """Host memory that points of return take."""
        ...

    def read_ahead(self, text: str, *, progress: Progress, notify: Notify, cancel: Event) -> bool:
        """Read what the next message begins with."""
        ...

    def stream(
        self, text: str, *, progress: Progress, notify: Notify, cancel: Event, **settings: Any
    ) -> Iterator[Piece]:
        """Answer a message."""
        ...

    def regenerate(
        self, *, progress: Progress, notify: Notify, cancel: Event, **settings: Any
    ) -> Iterator[Piece]:
        """Answer the last message again."""
        ...

    def edit(
        self,
        number: int,
        text: str,
        *,
        progress: Progress,
        notify: Notify,
        cancel: Event,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Answer a message in other words."""
        ...

    def undo(self) -> str:
        """Go back before the last message; its text."""
        ...

    def branch(self, number: int) -> None:
        """Go back to just after the answer to a message."""
        ...

    def switch(self, branch: int, *, progress: Progress, notify: Notify, cancel: Event) -> None:
        """Go to a branch."""
        ...
