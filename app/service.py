"""One model, and the conversation that is with it now; others wait on their shelves.

Everything that needs the model is a piece of `Work` for the engine's thread. One conversation is
in memory at a time, so that what the plan and the ladder say of memory holds; another is set aside
for it, and opened again in about a second.
"""

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvlite.chat.session import Session
from kvlite.documents import Document
from kvlite.errors import SettingError
from kvlite.memory.where import Holding, holding
from kvlite.model.calibration import Calibration
from kvlite.runner import Runner, open_runner
from kvlite.settings import Settings
from kvlite.sizes import readable

from .accounts import PageFinder
from .engine import Engine
from .freed import held_now, let_go
from .opened import Open
from .record import Record
from .shelf import Shelf
from .work import PAUSE, Work

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
        self._works: dict[tuple[str, str], Work] = {}

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
        work = self._works.get((owner, id))
        return None if work is None or work.shown.ended else work

    def require_idle(self, owner: str, id: str) -> None:
        """Raises SettingError if something is being done for a conversation, or waits to be."""
        if self.work_of(owner, id) is not None:
            raise SettingError("an answer is on its way in this conversation: stop it, or wait")

    def load(self, settings: Settings) -> Work:
        """Have a model loaded in the place of the one there is, whose memory is free first."""

        def task(work: Work) -> str:
            return self._load(settings, work)

        return self.engine.submit(task, "Loading the model")

    def say(self, owner: str, id: str, text: str, documents: Sequence[Document]) -> Work:
        """Have documents read, and a message answered if there is one."""

        def task(now: Open, work: Work) -> None:
            if documents:
                names = ", ".join(document.name for document in documents)
                work.begin(f"Reading {names}")
                now.record.name_after(names)
                now.session.read(documents, work.progress, work.note, work.cancel)
                now.keep()
            if text:
                now.record.name_after(text)
                work.begin("Reading the question" if documents else "Reading")
                now.answer(work, now.session.say(text))

        return self._with(owner, id, "Reading", task, draft=text)

    def regenerate(self, owner: str, id: str) -> Work:
        """Have the last message answered again; it is the draft if there is no other answer."""

        def task(now: Open, work: Work) -> None:
            number, message = now.session.message(None)
            try:
                now.answer(work, now.session.regenerate())
            finally:
                if len(now.session.messages) < number:
                    now.record.draft = message.text

        return self._with(owner, id, "Answering again", task)

    def edit(self, owner: str, id: str, number: int, text: str) -> Work:
        """Have message `number`, counted from 1, answered in other words.

        Raises:
            SettingError: there are none; or something is being done for it.
        """
        if not text.strip():
            raise SettingError("a message cannot be empty: type something, or go back before it")
        return self._with(
            owner,
            id,
            "Going back",
            lambda now, work: now.answer(work, now.session.edit(number, text)),
            draft=text,
        )

    def undo(self, owner: str, id: str) -> Work:
        """Go back before the last message, which is the draft then."""

        def task(now: Open, work: Work) -> None:
            _, message = now.session.message(None)
            now.session.undo(work.progress, work.note, work.cancel)
            now.record.draft = message.text

        return self._with(owner, id, "Going back", task)

    def branch(self, owner: str, id: str, number: int) -> Work:
        """Go back to just after the answer to message `number`, counted from 1."""
        return self._with(
            owner,
            id,
            "Going back",
            lambda now, work: now.session.branch(number, work.progress, work.note, work.cancel),
        )

    def switch(self, owner: str, id: str, branch: int) -> Work:
        """Go to a branch, counted from 1."""
        return self._with(
            owner,
            id,
            "Going to the branch",
            lambda now, work: now.session.switch(branch, work.progress, work.note, work.cancel),
        )

    def check(self, owner: str, id: str) -> Work:
        """Have the last answer checked; the work makes it anew from everything, beside the
        conversation."""

        def task(now: Open, work: Work) -> None:
            for piece in now.session.check()(work.progress, work.note, work.cancel):
                work.hear(piece)

        return self._with(owner, id, "Answering from everything", task)

    def change(self, owner: str, id: str, values: dict[str, Any]) -> Work:
        """Change settings of a conversation, from its next message on."""

        def task(now: Open, work: Work) -> None:
            if "system" in values and now.talk.messages:
                raise SettingError(
                    "what the model is told first cannot change once something was said: begin a "
                    "new conversation for it"
                )
            now.session.change(**values)
            now.record.changed = dict(now.session.changed)

        return self._with(owner, id, "Changing settings", task)

    def forget(self, owner: str, id: str) -> Work:
        """Delete a conversation, once nothing is done for it any more."""
        if (work := self.work_of(owner, id)) is not None:
            work.cancel.set()

        def task(_: Work) -> None:
            if self.open is not None and self.open.is_of(owner, id):
                self._drop()
            self.shelf(owner).delete(id)

        return self.engine.submit(task, "Deleting")

    def close(self, seconds: float = 60) -> None:
        """End what is being done, and keep the conversation in memory for another day."""
        self.engine.close(self._set_aside, seconds)

    def _with(
        self,
        owner: str,
        id: str,
        title: str,
        task: Callable[[Open, Work], Any],
        draft: str = "",
    ) -> Work:
        """Work on a conversation, which is in memory then and on disk afterwards.

        Args:
            draft: a message, kept from now on until it is answered.
        """
        self.shelf(owner).place(id)  # which refuses what is no id

        def whole(work: Work) -> Record:
            now = self._opened(owner, id, work)
            now.record.draft = draft or now.record.draft
            work.heed = now.glance
            work.begin(title)
            try:
                task(now, work)
            except BaseException:
                if now.shelf.has(id):  # what was refused makes no conversation
                    now.keep()
                raise
            else:
                now.keep()
            finally:
                work.heed = None
                now.look()
            return now.record

        with self._lock:
            self.require_idle(owner, id)
            if draft:
                with self.shelf(owner).changing(id) as record:
                    record.draft = draft
                    record.name_after(draft)
            going = {key: work for key, work in self._works.items() if not work.shown.ended}
            work = self.engine.submit(whole, title)
            self._works = {**going, (owner, id): work}
        return work

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
        """Load a model; what became of the former one's memory, in a sentence."""
        self._set_aside(work)
        freed = ""
        if self.runner is not None:
            name, before = Path(self.settings.model).name, held_now(self.runner.model.device)
            device = self.runner.model.device
            self.runner = None
            let_go(device)
            freed = f"{name} is gone, {readable(max(0, before - held_now(device)))} are free again"
            work.note(freed)
        work.begin(f"Loading {Path(settings.model).name}")
        runner = open_runner(settings, notify=lambda said: work.begin(said))
        self.holding = holding(runner.model)
        self.runner = runner
        self.settings = settings
        return freed
