"""What a conversation goes on from: all that the next turn depends on, but its settings."""

from dataclasses import dataclass
from typing import Any

from kvlite.cache import KVCache
from kvlite.conversation.history import Path
from kvlite.documents import Document
from kvlite.offload import HostKVStore


@dataclass(frozen=True)
class Unread:
    """What a light file has of a conversation: all but what comes of reading it.

    Attributes:
        token_ids: what had been read, to be read again.
        ways: as `recorded.walked` takes them, which wants the host store that reading makes.
        documents, pending, ahead, noted, given_up: as of `Held`.
    """

    token_ids: list[int]
    ways: dict[str, Any]
    documents: tuple[Document, ...]
    pending: list[int]
    ahead: list[int]
    noted: tuple[str, ...]
    given_up: list[str]


@dataclass(frozen=True)
class Held:
    """A conversation between two turns: what is not here is not saved.

    Attributes:
        cache, store, token_ids, documents: as of `Conversation`.
        paths: the ways it went; what was read ahead on the current one is the end of all that was
            read.
        at: the current one's index.
        pending: what was answered last and has not been read.
        noted: what the next answer is to note.
        given_up: the OOM policy's steps that were taken.
    """

    cache: KVCache
    store: HostKVStore | None
    token_ids: list[int]
    paths: list[Path]
    at: int
    documents: tuple[Document, ...]
    pending: list[int]
    noted: tuple[str, ...]
    given_up: list[str]

    @property
    def path(self) -> Path:
        """The way it is on."""
        return self.paths[self.at]

    @property
    def compacted(self) -> bool:
        """Whether reading its tokens again would not give what the cache holds."""
        return self.path.compacted
