"""A conversation that a server keeps, in memory or on disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.fork import forked
from kvlite.conversation.prefix import common
from kvlite.conversation.record import StoredMessage, ToldTimes

# Tokens up to which a conversation is short.
SHORT = 1024
# Tokens in common from which a conversation is gone on with, and its beginning shared.
_FEW, SHARED = 8, 64

Asked = tuple[list[int], dict[str, Any]]
"""A prompt, and the settings that it is answered with."""


@dataclass(eq=False)
class Kept:
    """A conversation that may go on.

    Attributes:
        ids: all that was read and generated.
        prompt: tokens of its last prompt; the answer after it may come back without its reasoning.
        settings: that matter to what is kept of it.
        talk: None while it is on disk alone.
        id: its own entry in the library; "" if it has none.
        path: the file to open it from: its own as it was last put there, or another's.
        changed: whether it has gone on since.
        used: when, as a number that grows.
        busy: whether an answer is coming in it; `reads` until all of its prompt is read.
        partings: tokens after which its last prompt, or another, may go on otherwise.
        said: what its last prompt said, for people.
        times: that its last prompt told.
        saved: when its prompt began, or what was read of it was last written, as of `perf_counter`.
        half_read: what is, since nobody waits for its answer any more.
        device_bytes, host_bytes: of memory that it takes; 0 while it is on disk alone.
        file_bytes, ends: of its file; `ends` as of `About`.
    """

    ids: list[int]
    settings: Settings
    talk: Conversation | None = None
    prompt: int | None = None
    id: str = ""
    path: Path | None = None
    changed: bool = True
    used: int = 0
    busy: bool = False
    reads: bool = False
    partings: Sequence[int] = ()
    said: Sequence[StoredMessage] = ()
    times: Sequence[ToldTimes] = ()
    saved: float = 0.0
    half_read: Asked | None = None
    device_bytes: int = 0
    host_bytes: int = 0
    file_bytes: int = 0
    ends: Sequence[int] | None = None

    @property
    def is_lent(self) -> bool:
        """Whether its file is another's, which stays as it is."""
        return self.path is not None and not self.id

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes, on the device and on the host."""
        return self.device_bytes + self.host_bytes

    @property
    def is_idle(self) -> bool:
        """Whether it may be written to disk, or leave memory."""
        return not self.busy and self.half_read is None

    @property
    def lends(self) -> bool:
        """Whether another can begin as it did: also while it answers from a cache that nothing
        leaves."""
        talk = self.talk
        if not self.busy:
            return True
        return talk is not None and not self.reads and not (talk.store and talk.store.begun)

    @property
    def is_short(self) -> bool:
        """Whether there is little to read again."""
        return len(self.ids) <= SHORT

    def is_gone_on_with(self, same: int) -> bool:
        """Whether a prompt with `same` tokens in common goes on there: it loses less than that of
        what was said to the model."""
        return same >= _FEW and 2 * same >= self._said

    @property
    def _said(self) -> int:
        """Tokens of what was said to the model that it has read."""
        return min(len(self.ids), self.prompt or len(self.ids))

    def is_left_by(self, same: int) -> bool:
        """Whether a prompt with `same` tokens in common shares its beginning, as much else of what
        was said to the model would be lost."""
        lost = self._said - same
        return same >= SHARED and (lost >= SHARED or not self.is_gone_on_with(same))

    def shared(self, same: int, longest: int, has_room: Callable[[int], bool]) -> "Kept | None":
        """One that begins with its first `same` tokens, or as many of them as can be had alone;
        None if there is no room. Raises KvliteError or MemoryError.

        Args:
            longest: tokens that it may have.
            has_room: whether so many bytes of the device are free.
        """
        talk = self.talk
        if talk is None and self.path is not None:
            lent = Kept(self.ids, self.settings, path=self.path)
            lent.file_bytes, lent.ends = self.file_bytes, self.ends
            return lent
        if talk is None or not has_room(talk.cache.nbytes * same // max(1, len(talk.token_ids))):
            return None
        work = partial(forked, talk, same, max(0, longest - same))
        made = talk.context.oom_policy.run(work, {})
        return None if made is None else Kept([*made.token_ids], self.settings, talk=made)

    def would_save(self, ids: Sequence[int], times: Sequence[ToldTimes]) -> int:
        """How many tokens of a prompt may have been read here, if it differs in its dates and times
        alone; 0 if it does not differ in these."""
        return min(self._said, len(ids)) if _have_changed(times, self.times) else 0

    def is_awaited_by(self, ids: Sequence[int], known: int) -> bool:
        """Whether much of a prompt is read here that is not `known` elsewhere, and it goes on with
        that, or can begin with it once that is read."""
        same = common(self.ids, ids)
        return same - known > SHORT and (self.reads or self.is_gone_on_with(same))


def held_bytes(talk: Conversation) -> tuple[int, int]:
    """Bytes of memory that a conversation takes: of the device, and of the host."""
    device, host = talk.cache.nbytes + talk.cache.state_bytes, talk.context.checkpoint_bytes
    if talk.store is not None:
        device += talk.store.index_bytes
        host += 0 if talk.store.on_disk else talk.store.nbytes
    return device, host


def _have_changed(now: Sequence[ToldTimes], before: Sequence[ToldTimes]) -> bool:
    """Whether a text of two prompts differs in its dates and times alone."""
    values = {each.text: each.values for each in before}
    return any(values.get(each.text, each.values) != each.values for each in now)
