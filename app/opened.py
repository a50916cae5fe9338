"""The conversation in memory: what is done with it, and what is kept of it on disk."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvlite.audience import Audience
from kvlite.chat.session import Session
from kvlite.chat.terminal import Begin
from kvlite.conversation import Conversation
from kvlite.errors import KvliteError, SnapshotError
from kvlite.ledger import Ledger
from kvlite.runner import Runner
from kvlite.settings import LOADING

from .accounts import Looker, PageFinder, account_of
from .figures import Figures, figures_of
from .record import Branch, Record, Said, keys_of, said_in
from .shelf import Shelf
from .work import Work

# Seconds for which figures are new enough.
NEW = 0.5


@dataclass
class Open:
    """A conversation in memory.

    Attributes:
        owner: whose it is.
        shelf: where it is kept.
        record: what people see of it.
        session: the conversation itself.
        finder: where the pages of its documents are.
        figures: what it holds, taken twice a second while something is done with it.
    """

    owner: str
    shelf: Shelf
    record: Record
    session: Session
    finder: PageFinder
    figures: Figures | None = None
    _looked: float = 0.0

    @property
    def talk(self) -> Conversation:
        """What was read and answered."""
        return self.session.talk

    def is_of(self, owner: str, id: str) -> bool:
        """Whether it is this one."""
        return (self.owner, self.record.id) == (owner, id)

    def look(self) -> None:
        """Take its figures."""
        self.figures = figures_of(self.owner, self.record.id, self.session)
        self._looked = time.monotonic()

    def glance(self) -> None:
        """Take its figures, if they are old."""
        if time.monotonic() - self._looked >= NEW:
            self.look()

    def answer(self, work: Work, begin: Begin) -> None:
        """Let an answer come, and remember what it was made from."""
        looker, last = Looker(self.session), None
        for piece in begin(work.progress, work.note, work.cancel):
            work.hear(piece)
            looker.saw(piece)
            last = piece.ledger
        self.record.draft = ""
        if last is not None:
            self.record.said = self._said()
            self._remember(last, looker)

    def _remember(self, ledger: Ledger, looker: Looker) -> None:
        key = keys_of(self.record.said)[-1]
        self.shelf.keep_account(self.record.id, key, account_of(ledger, looker, self.finder))

    def _said(self) -> list[Said]:
        return said_in(self.talk.messages, self.session.messages)

    def keep(self) -> None:
        """Bring a conversation to disk, as little of it as it takes to read it again. What people
        see of it comes last: however the program ends, the engine has all of that."""
        record, session, shelf = self.record, self.session, self.shelf
        shelf.place(record.id).mkdir(parents=True, exist_ok=True)
        shelf.whole(record.id).unlink(missing_ok=True)
        self.talk.save(shelf.light(record.id), light=True)
        with shelf.changing(record.id) as kept:
            kept.name = kept.name or record.name  # it may have been renamed
            kept.draft, kept.changed = record.draft, record.changed
            kept.began = kept.began or {
                name: value for name, value in vars(session.given).items() if name not in LOADING
            }
            kept.said, kept.used = self._said(), time.time()
            kept.model = session.given.model
            kept.waiting = [document.name for document in session.waiting]
            kept.branches = [
                Branch(_last_words(session, each.messages), each.current)
                for each in session.talk.branches
            ]
        self.record = kept

    def resume(self, runner: Runner, work: Work) -> None:
        """Go on with what was said before, from the cache that was kept or by reading again."""
        id, changed = self.record.id, self.record.changed
        whole, light = self.shelf.whole(id), self.shelf.light(id)
        if whole.is_file():
            work.begin(f"Opening {self.record.title}")
            try:
                self.session.resume(runner.open(whole, progress=work.progress, **changed))
                return
            except SnapshotError:
                pass  # it can be read again, unless it is another model's
        if light.is_file():
            work.begin(f"Reading {self.record.title} again")
            reading = Audience(work.progress, work.note, work.cancel)
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
        """Bring it to disk with its cache, if there is room: it is opened in a second then."""
        if not self.record.said and not self.record.waiting:
            return
        work.begin(f"Setting {self.record.title} aside")
        try:
            most = self.shelf.room_for_whole()
            self.talk.save(self.shelf.whole(self.record.id), progress=work.progress, most=most)
            self.shelf.make_room()
        except (KvliteError, OSError):
            pass  # it can be read again


def _last_words(session: Session, messages: Sequence[dict[str, str]]) -> str:
    """The last message of the user's on a branch, by which it is known."""
    typed = session.typed(messages)
    return typed[-1].text if typed else "the beginning"
