"""One model, and the conversation that is with it now; others wait on their shelves.

Everything that needs the model is a piece of `Work` for the engine's thread. One conversation is
in memory at a time, so that what the plan and the ladder say of memory holds; another is set aside
for it, and opened again in about a second.
"""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlite.chat.session import Session
from kvlite.conversation import Conversation
from kvlite.documents import Document
from kvlite.errors import SettingError, SnapshotError
from kvlite.memory.where import Holding, holding
from kvlite.model.calibration import Calibration
from kvlite.model.making import load_transformers
from kvlite.model.source import find_model
from kvlite.runner import Runner, open_runner
from kvlite.settings import Settings
from kvlite.sizes import readable

from .accounts import PageFinder
from .engine import Engine
from .freed import held_now, let_go
from .going import NOTHING, Going, Sent, as_shown
from .opened import Open
from .record import Record
from .shelf import Shelf
from .uploads import read_upload
from .work import PAUSE, Task, Work

OpenTask = Callable[[Open, Work], Any]
# Pieces of work that have ended and may still be asked about.
_ENDED = 100
# Seconds between two looks at an answer where looking takes from computing.
_SLOWLY = 0.3


class Service:
    """What all pages talk to.

    Attributes:
        settings: what the model is loaded with, and conversations begin with.
        engine: the thread that does the work.
        runner: the model, None while there is none.
        holding: what it holds while no conversation is in memory.
        open: the conversation in memory.
    """

    def __init__(self, settings: Settings, root: Path | None = None) -> None:
        """Without a model yet.

        Args:
            root: kvlite's data folder, if not the usual one.
        """
        self.settings = settings
        self.engine = Engine()
        self.runner: Runner | None = None
        self.holding = Holding(())
        self.open: Open | None = None
        self._root = root
        self._shelves: dict[str, Shelf] = {}
        self._lock = threading.Lock()
        self._going: dict[tuple[str, str], Going] = {}

    def shelf(self, owner: str) -> Shelf:
        """The conversations of a user, "" where nobody logs in."""
        return self._shelves.setdefault(owner, Shelf(owner, self._root))

    @property
    def calibration(self) -> Calibration | None:
        """What was measured of the model, if there is one and it was."""
        runner = self.runner
        return None if runner is None else runner.model.calibration

    @property
    def pause(self) -> float:
        """Seconds between two looks at an answer: where the model computes with the cores that draw
        it, every look costs it some of its speed."""
        runner = self.runner
        return _SLOWLY if runner is None or runner.model.device.type == "cpu" else PAUSE

    def held_bytes(self) -> int:
        """What the model there is holds of its device."""
        runner = self.runner
        return 0 if runner is None else held_now(runner.model.device)

    def work_of(self, owner: str, id: str) -> Work | None:
        """What is being done, or waits to be, for a conversation."""
        going = self.going(owner, id)
        return None if going is None or going.ended else going.work

    def going(self, owner: str, id: str) -> Going | None:
        """What is done for a conversation, or was last, as far as that is remembered."""
        return self._going.get((owner, id))

    def record(self, owner: str, id: str) -> Record:
        """What people see of a conversation, a new one if there is none: as it is on disk, unless
        there was no room for that."""
        now = self.open
        if now is not None and now.is_of(owner, id) and not now.kept:
            return replace(now.record)
        return self.shelf(owner).record_or_new(id)

    def shown(self, owner: str, id: str) -> Record:
        """A conversation as people see it now."""
        return as_shown(self.record(owner, id), self.going(owner, id))

    def settings_of(self, owner: str, id: str) -> Settings:
        """What a conversation has now."""
        record = self.record(owner, id)
        try:
            return self.settings.replace({**record.began, **record.changed})
        except SettingError:  # it was had with another version
            return self.settings

    def require_idle(self, owner: str, id: str) -> None:
        """Raises SettingError if something is being done for a conversation, or waits to be."""
        if self.work_of(owner, id) is not None:
            raise SettingError("an answer is on its way in this conversation: stop it, or wait")

    def load(self, settings: Settings) -> Work:
        """Have a model loaded in the place of the one there is, whose memory is free first."""

        def task(work: Work) -> str:
            return self._load(settings, work)

        return self.engine.submit(task, "Loading the model", public="the model is being loaded")

    def say(self, owner: str, id: str, text: str, files: Sequence[str] = ()) -> Work:
        """Have uploaded files read, and a message answered if there is one."""
        documents, unread = list[Document](), list(files)

        def opened(work: Work) -> None:
            documents.extend(read_upload(file, work) for file in files)

        def task(now: Open, work: Work) -> None:
            reading_s = 0.0
            if documents:
                names = ", ".join(document.name for document in documents)
                work.begin(f"Reading {names}")
                now.record.name_after(names)
                begun = time.monotonic()
                if now.session.read(documents, *work.audience):
                    reading_s = time.monotonic() - begun
                unread.clear()
                now.keep()
            if text:
                now.record.name_after(text)
                work.begin("Reading the question" if documents else "Reading")
                now.answer(work, now.session.say(text), reading_s)
                now.record.draft = ""

        sent = Sent(text, len(self.record(owner, id).said), unread)
        first = opened if files else None
        return self._with(owner, id, "Reading", task, sent, first)

    def regenerate(self, owner: str, id: str) -> Work:
        """Have the last message answered again; it is the draft if there is no other answer."""

        def task(now: Open, work: Work) -> None:
            number, message = now.session.message(None)
            try:
                now.answer(work, now.session.regenerate())
            finally:
                if len(now.session.messages) < number:
                    now.record.draft = message.text

        above = max(0, len(self.record(owner, id).said) - 1)
        return self._with(owner, id, "Answering again", task, Sent(above=above))

    def edit(self, owner: str, id: str, number: int, text: str) -> Work:
        """Have message `number`, counted from 1, answered in other words.

        Raises:
            SettingError: there are none; or something is being done for it.
        """
        if not text.strip():
            raise SettingError("a message cannot be empty: type something, or go back before it")

        def task(now: Open, work: Work) -> None:
            now.answer(work, now.session.edit(number, text))
            now.record.draft = ""

        above = self.record(owner, id).before(number)
        return self._with(owner, id, "Going back", task, Sent(text, above))

    def undo(self, owner: str, id: str) -> Work:
        """Go back before the last message, which is the draft then."""

        def task(now: Open, work: Work) -> None:
            _, message = now.session.message(None)
            now.session.undo(*work.audience)
            now.record.draft = message.text

        return self._with(owner, id, "Going back", task)

    def branch(self, owner: str, id: str, number: int) -> Work:
        """Go back to just after the answer to message `number`, counted from 1."""

        def task(now: Open, work: Work) -> None:
            now.session.branch(number, *work.audience)

        return self._with(owner, id, "Going back", task)

    def switch(self, owner: str, id: str, branch: int) -> Work:
        """Go to a branch, counted from 1."""

        def task(now: Open, work: Work) -> None:
            now.session.switch(branch, *work.audience)

        return self._with(owner, id, "Going to the branch", task, Sent(branch=branch))

    def check(self, owner: str, id: str) -> Work:
        """Have the last answer checked; the work makes it anew from everything, beside the
        conversation."""

        def task(now: Open, work: Work) -> None:
            for piece in now.session.check()(*work.audience):
                work.hear(piece)

        return self._with(owner, id, "Answering from everything", task)

    def require_change(self, owner: str, id: str, values: dict[str, Any]) -> None:
        """Raises SettingError if these settings of a conversation cannot change any more."""
        if "system" in values and self.record(owner, id).said:
            raise SettingError(
                "what the model is told first cannot change once something was said: begin a "
                "new conversation for it"
            )

    def change(self, owner: str, id: str, values: dict[str, Any]) -> Work:
        """Change settings of a conversation, from its next message on.

        Raises:
            SettingError: what the model is told first cannot change any more.
        """
        self.require_change(owner, id, values)

        def task(now: Open, work: Work) -> None:
            now.session.change(**values)
            now.record.changed = dict(now.session.changed)

        def change(work: Work) -> Record:
            self.require_change(owner, id, values)  # something may have been said before its turn
            if self.open is not None and self.open.is_of(owner, id):
                return self._worked(owner, id, work, "Changing settings", task)
            wanted = self.settings_of(owner, id).after_load(values)
            if self.runner is not None:
                Conversation(self.runner.model, wanted)  # which checks them
            with self.shelf(owner).changing(id) as record:
                record.changed |= values
            return record

        return self._submit(owner, id, "Changing settings", change)

    def forget(self, owner: str, id: str) -> Work:
        """Delete a conversation: nobody sees it any more, and what the engine has of it goes once
        nothing is done for it.

        Raises:
            SettingError: some of it is still there.
        """

        def task(_: Work) -> None:
            if self.open is not None and self.open.is_of(owner, id):
                self._drop()
            self.shelf(owner).delete(id)  # and what was written meanwhile

        with self._lock:
            if (work := self.work_of(owner, id)) is not None:
                work.cancel.set()
            try:
                self.shelf(owner).delete(id)
            finally:
                gone = self.engine.submit(task, "Deleting")
        return gone

    def close(self, seconds: float = 60) -> str:
        """End what is being done, and keep the conversation in memory for another day; why that
        cannot be, if so."""
        told = list[str]()

        def last(work: Work) -> None:
            try:
                self._set_aside(work)
            except SnapshotError as error:
                told.append(f"its last answer is lost: {error}")
            for shelf in self._shelves.values():
                shelf.sweep()

        self.engine.close(last, seconds)
        return " ".join(told)

    def _with(
        self,
        owner: str,
        id: str,
        title: str,
        task: OpenTask,
        sent: Sent = NOTHING,
        first: Task | None = None,
    ) -> Work:
        """Work on a conversation, which is in memory then and on disk afterwards."""

        def whole(work: Work) -> Record:
            return self._worked(owner, id, work, title, task, sent.text)

        return self._submit(owner, id, title, whole, sent, first)

    def _submit(
        self,
        owner: str,
        id: str,
        title: str,
        whole: Task,
        sent: Sent = NOTHING,
        first: Task | None = None,
    ) -> Work:
        """Have something done for a conversation, one thing at a time.

        Args:
            sent: whose text is kept from now on until it is answered.
            first: as of `Engine.submit`.
        """
        self.shelf(owner).place(id)  # which refuses what is no id
        shelf, key = self.shelf(owner), (owner, id)
        with self._lock:
            self.require_idle(owner, id)
            shelf.require_there(id)
            if sent.text:
                shelf.keep_draft(id, sent.text)
            work = self.engine.submit(whole, title, first)
            rest = {each: going for each, going in self._going.items() if each != key}
            ended = [each for each, going in rest.items() if going.ended]
            for each in ended[: max(0, len(ended) - _ENDED)]:
                del rest[each]
            self._going = {**rest, key: Going(work, sent)}
        return work

    def _worked(
        self, owner: str, id: str, work: Work, title: str, task: OpenTask, draft: str = ""
    ) -> Record:
        """Work on a conversation that is in memory then, by the engine's thread."""
        now = self._opened(owner, id, work)
        now.record.draft = draft or now.record.draft
        work.heed = now.glance
        work.begin(title)
        try:
            task(now, work)
        except BaseException:
            if now.shelf.has(id):  # what was refused makes no conversation
                with suppress(SnapshotError):  # that it went wrong comes first
                    now.keep()
            raise
        else:
            now.keep()
        finally:
            work.heed = None
            now.look()
        return now.record

    def _opened(self, owner: str, id: str, work: Work) -> Open:
        """The conversation, in memory."""
        if self.runner is None:
            self._load(self.settings, work)
        assert self.runner is not None
        if self.open is not None and self.open.is_of(owner, id):
            return self.open
        self._set_aside(work)
        shelf = self.shelf(owner)
        record = shelf.record_or_new(id)
        session = Session(self.runner, self.settings)
        if record.changed:
            try:
                session.begin(**record.changed)
            except SettingError as error:  # they are another version's, or another model's
                work.note(f"{record.title} goes on without its own settings: {error}")
                record.changed = {}
        self.open = Open(owner, shelf, record, session, PageFinder(session))
        try:
            self.open.resume(self.runner, work)
        except BaseException:
            self.open = None
            raise
        return self.open

    def _set_aside(self, work: Work) -> None:
        """Let the conversation in memory go to disk, with its cache if there is room."""
        now = self.open
        if now is None:
            return
        now.set_aside(work)
        self._drop()

    def _drop(self) -> None:
        self.open = None
        gc.collect()

    def _load(self, settings: Settings, work: Work) -> str:
        """Load a model, once it is found; what became of the former one's memory, in a sentence."""
        load_transformers()
        find_model(settings.model, work.begin)
        self._set_aside(work)
        freed = ""
        if self.runner is not None:
            device, before = self.runner.model.device, self.held_bytes()
            self.runner = None
            name = Path(self.settings.model).name
            freed = f"{name} is gone, {readable(let_go(device, before))} are free again"
            work.note(freed)
        work.begin(f"Loading {Path(settings.model).name}")
        runner = open_runner(settings, notify=lambda said: work.begin(said))
        self.holding = holding(runner.model)
        self.runner = runner
        self.settings = settings
        return freed
