"""What a conversation goes on from: all that the next turn depends on, but its settings."""

from dataclasses import dataclass

from kvlite.branches import Walked
from kvlite.cache import KVCache
from kvlite.documents import Document
from kvlite.offload import Tier


@dataclass(frozen=True)
class Held:
    """A conversation between two turns: what is not here is not saved.

    Attributes:
        cache, tier, token_ids, documents: as of `Conversation`.
        ways: that it went.
        pending: what was answered last and has not been read.
        ahead: tokens at the end of what was read that the next message must begin with.
        noted: what the next answer is to note.
        given_up: the ladder's rungs that were taken.
    """

    cache: KVCache
    tier: Tier | None
    token_ids: list[int]
    ways: Walked
    documents: tuple[Document, ...]
    pending: list[int]
    ahead: list[int]
    noted: tuple[str, ...]
    given_up: list[str]
