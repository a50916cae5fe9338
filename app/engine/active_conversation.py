"""The conversation in memory: what is done with it, and what is kept of it on disk."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlite.conversation.conversation import Conversation
from kvlite.conversation.file_info import about
from kvlite.conversation.library import Library
from kvlite.conversation.record import Record, StoredMessage, keys_of, stored
from kvlite.conversation.retold import read_with
from kvlite.conversation.runner import Runner
from kvlite.conversation.session import Session
from kvlite.engine.callbacks import ReadingBytes
from kvlite.errors import KvliteError, SnapshotError
from kvlite.model.layers import Layers
from kvlite.planner.usage import Holding, Part, holding, weights_of
from kvlite.web.work import Shown, Work

from .accounts import account_of, look_at
from .open_conversation import Begin, OpenConversation

# Seconds for which figures are new enough.
NEW = 0.5


@dataclass(frozen=True)
class Figures:
    """What the conversation in memory holds and does, measured by the engine's thread.

    Attributes:
        owner, id: whose it is, and which.
        seen, reading, most: tokens it has, those that are being read, and the most the model was
            trained for.
        kv_bytes, full_kv_bytes: of its cache, and what they would be if nothing were dropped.
        host_kv_bytes: of the store that entries are recalled from, in host memory or on disk.
        first_token_s, tokens_per_s: of the last answer, or the one that is coming; the first token
            counted from when reading its documents began.
        fallbacks: what was given up because memory was short.
    """

    owner: str
    id: str
    holding: Holding
    seen: int
    reading: int
    most: int
    kv_bytes: int
    full_kv_bytes: int
    host_kv_bytes: int
    first_token_s: float | None
    tokens_per_s: float | None
    fallbacks: tuple[str, ...]


class ActiveConversation(OpenConversation[Session]):
    """A conversation in memory and its figures, which are measured at most twice a second while
    something is done with it; `reading_s` is how long the documents of its last message were
    read."""

    unwritten = (
        "{name} is in memory only, as it cannot be written: {error}; it is kept "
        "with its next message once there is room"
    )

    def __init__(self, store: Library, record: Record, session: Session) -> None:
        super().__init__(store, record, session)
        self.figures: Figures | None = None
        self.reading_s = self._looked = 0.0
        self._weights: tuple[Layers, Part] | None = None
        self._writer = store.hold(record.id, record.title)

    def release(self) -> None:
        """Let other programs write it."""
        self._writer.release()

    @property
    def talk(self) -> Conversation:
        """The conversation itself."""
        return self.session.talk

    def glance(self, shown: Shown) -> None:
        """Measure its figures if they are old; the weights only if layers were replaced."""
        if time.monotonic() - self._looked >= NEW:
            self.look(shown.reading, weights_too=False)

    def look(self, reading: ReadingBytes | None = None, *, weights_too: bool = True) -> None:
        """Measure its figures, with what a reading holds that is under way."""
        talk, last, shape = self.talk, self.session.last, self.session.runner.shape
        cache, store, layers = talk.cache, talk.store, talk.model.layers
        if weights_too or self._weights is None or self._weights[0] is not layers:
            self._weights = layers, weights_of(talk.model)
        saved, weights = talk.context.checkpoint_bytes, self._weights[1]
        held = holding(talk.model, cache, store, saved, weights=weights, reading=reading)
        self.figures = Figures(
            owner=self.store.owner,
            id=self.record.id,
            holding=held,
            seen=cache.seen,
            reading=0 if reading is None else reading.tokens,
            most=shape.max_context,
            kv_bytes=cache.nbytes if reading is None else reading.kept,
            full_kv_bytes=shape.full_kv_bytes(cache.seen, talk.model.dtype.itemsize),
            host_kv_bytes=0 if store is None or not store.begun else store.nbytes,
            first_token_s=None if last is None else last.time_to_first_token_s + self.reading_s,
            tokens_per_s=None if last is None else last.decode_tokens_per_s,
            fallbacks=tuple(talk.context.oom_policy.taken),
        )
        self._looked = time.monotonic()

    def answer(self, work: Work, begin: Begin, reading_s: float = 0.0) -> None:
        """Generate an answer, and keep its account; its documents were read in `reading_s`."""
        before, last, self.reading_s = None, None, reading_s
        for piece in begin(work.callbacks):
            work.hear(piece)
            if last is None:  # the question has been read
                before = look_at(self.session)
            last = piece
        if last is None:
            return
        record = self.record
        record.said = [*record.said[: record.earlier], *self._stored(self.talk.messages)]
        with suppress(OSError):  # the user learns of a full disk when the conversation is kept
            account = account_of(last.metrics, before, self.session, reading_s)
            self.store.keep_account(record.id, keys_of(record.said)[-1], account)

    def _said(self) -> tuple[list[list[StoredMessage]], int]:
        said = [self._stored(each.messages) for each in self.talk.branches]
        return said, self.talk.history.current

    def _stored(self, messages: Sequence[dict[str, Any]]) -> list[StoredMessage]:
        return stored(messages, self.session.typed(messages))

    def _write(self) -> None:
        self.store.whole(self.record.id).unlink(missing_ok=True)
        self.talk.save(self.store.light(self.record.id), light=True)

    def resume(self, runner: Runner, work: Work) -> None:
        """Go on with what was said before, from its cache on disk or by reading it again, as what
        another model has read must be. Raises SnapshotError if what is on disk is damaged or
        gone."""
        id, changed = self.record.id, self.record.changed
        whole, light = self.store.whole(id), self.store.light(id)
        if whole.is_file():
            work.begin(f"Opening {self.record.title}")
            try:
                self.session.resume(runner.open(whole, progress=work.progress, **changed))
                return
            except SnapshotError:
                pass  # it can be read again
        if light.is_file() and about(light).identity == runner.identity:
            work.begin(f"Reading {self.record.title} again")
            self.session.resume(runner.open(light, reading=work.callbacks, **changed))
        elif light.is_file():
            name = Path(self.session.given.model).name
            work.begin(f"Reading {self.record.title} again with {name}")
            self.session.resume(read_with(runner, light, work.callbacks, **changed))
        elif self.store.served(id).is_file():
            raise SnapshotError(
                f"{self.record.title} was had with a server: end the app, and begin it with "
                "--server to go on with it"
            )
        elif self.record.said:
            raise SnapshotError(
                f"{light} is gone, without which nobody can go on: what was said can still be "
                "exported"
            )

    def set_aside(self, work: Work) -> None:
        """Write it to disk, with its cache if there is room: then it opens in a second. Raises
        SnapshotError if it cannot even be written without its cache."""
        if not self.kept:
            self.keep("a conversation")
        gone = self.store.is_gone(self.record.id)
        if gone or not (self.record.said or self.record.waiting):
            return
        work.begin("Setting another conversation aside")  # which may be another user's
        with suppress(KvliteError, OSError):  # it can be read again
            most = self.store.room_for_whole()
            self.talk.save(self.store.whole(self.record.id), progress=work.progress, most=most)
            self.store.make_room()
