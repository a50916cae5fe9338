"""What a conversation goes on from: all that the next turn depends on, but its settings."""

from dataclasses import dataclass
from typing import Any

from kvlite.cache import KVCache
from kvlite.conversation.history import Branch
from kvlite.documents import Document
from kvlite.offload import HostKVStore


@dataclass(frozen=True, kw_only=True)
class _State:
    """What files have of a conversation, with its cache or without.

    Attributes:
        token_ids: all that was read.
        documents: as of `Conversation`.
        pending_ids: what was answered last and has not been read.
        notes: what the next answer is to note.
        fallbacks: the OOM policy's steps that were taken.
    """

    token_ids: list[int]
    documents: tuple[Document, ...]
    pending_ids: list[int]
    notes: tuple[str, ...]
    fallbacks: list[str]


@dataclass(frozen=True, kw_only=True)
class TokenState(_State):
    """A conversation without its cache, as a token-only snapshot has it: its tokens are read again.

    Attributes:
        history: as `history_file.history_from` takes it, which wants the host store that reading
            makes.
        prefilled_ids: as of the current branch.
    """

    history: dict[str, Any]
    prefilled_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class SessionState(_State):
    """A conversation between two turns: what is not here is not saved.

    Attributes:
        cache, store: as of `Conversation`.
        branches: what was read ahead on the current one is the end of all that was read.
        current: its index.
    """

    cache: KVCache
    store: HostKVStore | None
    branches: list[Branch]
    current: int

    @property
    def branch(self) -> Branch:
        """The one it is on."""
        return self.branches[self.current]
