"""The conversation in memory: what is done with it, and what is kept of it on disk."""

import time
from contextlib import suppress
from dataclasses import dataclass

from kvlite.config.settings import LOADING
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import GenerationMetrics
from kvlite.conversation.runner import Runner
from kvlite.conversation.session import Begin, Session
from kvlite.errors import KvliteError, SnapshotError
from kvlite.model.layers import Layers
from kvlite.planner.usage import Part, weights_of

from ..storage.branches import branches_of
from ..storage.record import Record, StoredMessage, keys_of, said_in
from ..storage.store import ConversationStore
from .accounts import CacheObserver, PageFinder, account_of
from .figures import Figures, figures_of
from .work import Work

# Seconds for which figures are new enough.
NEW = 0.5


@dataclass
class ActiveConversation:
    """A conversation in memory.

    Attributes:
        store: where it is kept.
        record: what people see of it.
        session: the conversation itself.
        finder: where the pages of its documents are.
        figures: what it holds, taken twice a second while something is done with it.
        kept: whether all of it is on disk.
    """

    store: ConversationStore
    record: Record
    session: Session
    finder: PageFinder
    figures: Figures | None = None
    kept: bool = True
    _looked: float = 0.0
    _weights: tuple[Layers, Part] | None = None

    @property
    def talk(self) -> Conversation:
        """What was read and answered."""
        return self.session.talk

    def is_of(self, store: ConversationStore, id: str) -> bool:
        """Whether it is this one."""
        return self.store is store and self.record.id == id

    def look(self) -> None:
        """Take its figures."""
        self._weights = None
        self._look()

    def glance(self) -> None:
        """Take its figures, if they are old; weights are counted anew if layers were replaced."""
        if time.monotonic() - self._looked >= NEW:
            self._look()

    def _look(self) -> None:
        layers = self.talk.model.layers
        if self._weights is None or self._weights[0] is not layers:
            self._weights = layers, weights_of(self.talk.model)
        self.figures = figures_of(self.store.owner, self.record.id, self.session, self._weights[1])
        self._looked = time.monotonic()

    def answer(self, work: Work, begin: Begin, reading_s: float = 0.0) -> None:
        """Let an answer come, and remember what it was made from.

        Args:
            reading_s: seconds that reading its documents took before.
        """
        looker, last = CacheObserver(self.session), None
        for piece in begin(work.callbacks):
            work.hear(piece)
            looker.saw(piece)
            last = piece.metrics
        if last is not None:
            self.record.said = self._said()
            self._remember(last, looker, reading_s)

    def _remember(
        self, metrics: GenerationMetrics, looker: CacheObserver, reading_s: float
    ) -> None:
        key = keys_of(self.record.said)[-1]
        with suppress(OSError):  # what is said of a full disk is said of the conversation
            account = account_of(metrics, looker, self.finder, reading_s)
            self.store.keep_account(self.record.id, key, account)

    def _said(self) -> list[StoredMessage]:
        return said_in(self.session, self.talk.messages)

    def keep(self, called: str = "this conversation") -> None:
        """Bring a conversation to disk, as little of it as it takes to read it again. What people
        see of it comes last: however the program ends, the engine has all of that.

        Args:
            called: what to call it, where others may read that.

        Raises:
            SnapshotError: there is no room for it; it is all in memory.
        """
        record, store = self.record, self.store
        if store.is_gone(record.id):
            return
        self.kept = False
        self._renew(record)
        try:
            store.place(record.id).mkdir(parents=True, exist_ok=True)
            store.whole(record.id).unlink(missing_ok=True)
            self.talk.save(store.light(record.id), light=True)
            with store.changing(record.id) as kept:
                kept.name = kept.name or record.name  # it may have been renamed
                self._renew(kept)
        except (KvliteError, OSError) as error:
            raise SnapshotError(
                f"{called} is in memory only, as it cannot be written: {error}; make room on the "
                "disk, and it is kept with its next message"
            ) from error
        self.record, self.kept = kept, True

    def _renew(self, record: Record) -> None:
        """Have a record say how things are now."""
        session = self.session
        record.draft, record.changed = self.record.draft, dict(self.record.changed)
        record.began = record.began or {
            name: value for name, value in vars(session.given).items() if name not in LOADING
        }
        record.said, record.used = self._said(), time.time()
        record.model = session.given.model
        record.waiting = [document.name for document in session.waiting]
        record.branches, record.elsewhere = branches_of(session)

    def resume(self, runner: Runner, work: Work) -> None:
        """Go on with what was said before, from the cache that was kept or by reading again."""
        id, changed = self.record.id, self.record.changed
        whole, light = self.store.whole(id), self.store.light(id)
        if whole.is_file():
            work.begin(f"Opening {self.record.title}")
            try:
                self.session.resume(runner.open(whole, progress=work.progress, **changed))
                return
            except SnapshotError:
                pass  # it can be read again, unless it is another model's
        if light.is_file():
            work.begin(f"Reading {self.record.title} again")
            reading = work.callbacks
            try:
                self.session.resume(runner.open(light, reading=reading, **changed))
            except SnapshotError as error:
                raise self._refused(error) from None
        elif self.record.said:
            raise SnapshotError(
                f"{light} is gone, without which nobody can go on: what was said can still be "
                "exported"
            )

    def _refused(self, error: SnapshotError) -> SnapshotError:
        """What to do about a conversation that cannot be gone on with."""
        model = self.record.model
        if model == self.session.given.model:
            return error
        return SnapshotError(
            f"{self.record.title} was had with {model}: choose that model in the settings to go on "
            f"with it, or begin a new conversation ({error})"
        )

    def set_aside(self, work: Work) -> None:
        """Bring it to disk with its cache, if there is room: it is opened in a second then.

        Raises:
            SnapshotError: there is not even room for what it takes to read it again.
        """
        if not self.kept:
            self.keep("a conversation")
        if self.store.is_gone(self.record.id):
            return
        if not self.record.said and not self.record.waiting:
            return
        work.begin("Setting another conversation aside")  # which may be another user's
        try:
            most = self.store.room_for_whole()
            self.talk.save(self.store.whole(self.record.id), progress=work.progress, most=most)
            self.store.make_room()
        except (KvliteError, OSError):
            pass  # it can be read again
