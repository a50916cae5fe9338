"""One model, and the conversation that is in memory with it.

One conversation is in memory at a time, so that what the plan and the OOM policy say of memory
holds. Others are on disk, and are opened again in about a second.
"""

import gc
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.conversation.library import Library
from kvlite.conversation.runner import Runner, open_runner, prepare
from kvlite.conversation.session import Session
from kvlite.errors import ContextError, SettingError
from kvlite.memory.free import held_bytes, return_memory
from kvlite.model.files import fingerprint
from kvlite.model.text_limit import require_fits
from kvlite.model.transformers_lock import load_transformers
from kvlite.planner.usage import Holding, holding
from kvlite.web.work import PAUSE, Work, without_traceback

from .active_conversation import ActiveConversation

if TYPE_CHECKING:
    from ..openai_server import LentModel

# Characters of a text while there is no model.
_LONGEST = 4_000_000
# Seconds between two looks at an answer where looking takes time from computing.
_SLOWLY = 0.3


class ModelHost:
    """What the engine's thread works with. Other threads only look, at values that may change at
    any time.

    Attributes:
        settings: what the model is loaded with, and conversations begin with.
        runner: the model; None while there is none.
        holding: what the model holds while no conversation is in memory.
        active: the conversation in memory.
        lent: what programs have of the model; None if they cannot use it.
    """

    beside = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lent: LentModel | None = None
        self.runner: Runner | None = None
        self.holding = Holding(())
        self.active: ActiveConversation | None = None

    @property
    def pause(self) -> float:
        """Seconds between two looks at an answer: on a CPU every look slows the model down."""
        runner = self.runner
        return _SLOWLY if runner is None or runner.model.device.type == "cpu" else PAUSE

    @property
    def text_limit(self) -> int:
        """The most characters that can fit the model, or any while there is none."""
        runner = self.runner
        return _LONGEST if runner is None else runner.text_limit

    def require_fits(self, text: str, cancel: Event | None = None) -> None:
        """Refuse a text that is too long for the model, or for any if there is none yet, before it
        waits, is kept, or is read: raises ContextError, or Stopped if `cancel` was set."""
        runner, most = self.runner, self.text_limit
        if len(text) > most:
            raise ContextError(
                f"{len(text):,} characters are more than the {most:,} that can fit the model: ask "
                "about a part of it, split it, or choose a model with a longer context"
            )
        if runner is not None:
            require_fits(runner.model.tokenizer, text, runner.shape.max_context, cancel)

    def held_bytes(self) -> int:
        """Bytes of its device that would be free without the model and what is read with it."""
        active, lent = self.active, self.lent
        figures = None if active is None else active.figures
        held = self.holding if figures is None else figures.holding
        programs = None if lent is None else lent.current.conversations
        others = 0 if programs is None else programs.held_bytes
        return others + sum(part.nbytes for part in held.device)

    def holds(self, store: Library, id: str) -> ActiveConversation | None:
        """A conversation, if it is the one in memory."""
        now = self.active
        return now if now is not None and now.store is store and now.record.id == id else None

    def load(self, settings: Settings, work: Work) -> str:
        """Load a model in the place of the one there is; a sentence on the memory that is free
        now. What can be refused before is refused while the former is there; where only loading
        tells, the former comes back with its conversation."""
        load_transformers()
        freed = self.held_bytes()
        prepared = prepare(settings, work.begin, cancel=work.cancel, freed=freed)
        if self.runner is None:
            self._expect(settings, work)
            self._use(prepared.load(work.begin, work.cancel), settings)
            return ""
        fingerprint(prepared.folder)  # raises ModelError where files are damaged
        active, former = self.active, self.settings
        was = None if active is None else (active.store, active.record.id)
        del prepared, active
        told = self._unload(settings, work)
        failure = self._failure(settings, work)
        if failure is None:
            work.note(told)
            return told
        if work.cancel.is_set():
            work.note(f"{Path(former.model).name} comes back with the next message")
        else:
            self._return_to(former, was, work)
        raise failure

    def _expect(self, settings: Settings, work: Work) -> None:
        if self.lent is not None:
            self.lent.expect(settings, work)
        work.begin(f"Loading {Path(settings.model).name}")

    def _use(self, runner: Runner, settings: Settings) -> None:
        self.holding = holding(runner.model)
        self.runner, self.settings = runner, settings
        if self.lent is not None:
            self.lent.current.use(runner)

    def _unload(self, settings: Settings, work: Work) -> str:
        assert self.runner is not None
        self.set_aside(work)
        self._expect(settings, work)
        devices, name = self.runner.model.all_devices, Path(self.settings.model).name
        before = held_bytes(devices)
        self.runner, self.holding = None, Holding(())
        left = max(0, before - return_memory(devices))
        return f"{name} is gone, {readable(left)} are free again"

    def _failure(self, settings: Settings, work: Work) -> Exception | None:
        """Load a model where there is none; what went wrong, without what it had read."""
        try:
            self._use(open_runner(settings, work.begin, cancel=work.cancel), settings)
        except Exception as error:
            return without_traceback(error)
        return None

    def _return_to(self, settings: Settings, was: tuple[Library, str] | None, work: Work) -> None:
        name = Path(settings.model).name
        try:
            self._expect(settings, work)
            self._use(open_runner(settings, work.begin, cancel=work.cancel), settings)
            if was is not None:
                self.opened(*was, work)
        except Exception as error:  # what is raised is why the other one was refused
            work.note(f"{name} comes back with the next message: {error}")
        else:
            work.note(f"{name} is in use as before")

    def lend(self, lent: "LentModel") -> None:
        """Let programs use the model, too, whichever it is."""
        self.lent = lent
        if self.runner is not None:
            lent.current.use(self.runner)

    def set_aside(self, work: Work) -> None:
        """Write the conversation in memory to disk and free its memory."""
        if self.active is not None:
            self.active.set_aside(work)
            self.drop()

    def drop(self) -> None:
        """Free the memory of the conversation in memory."""
        if self.active is not None:
            self.active.release()
        self.active = None
        gc.collect()

    def opened(self, store: Library, id: str, work: Work) -> ActiveConversation:
        """The conversation, in memory."""
        if self.runner is None:
            self.load(self.settings, work)
        assert self.runner is not None
        work.planned = None if self.lent is None else self.lent.make_room
        if (now := self.holds(store, id)) is not None:
            return now
        self.set_aside(work)
        if self.lent is not None and (whole := store.whole(id)).is_file():
            self.lent.make_room(whole.stat().st_size)
        record = store.record_or_new(id)
        if record.is_document:
            record.name = ""
            record.name_after(record.draft)
        session = Session(self.runner, self.settings)
        if record.changed:
            try:
                session.begin(**record.changed)
            except SettingError as error:  # they are another version's, or another model's
                work.note(f"{record.title} goes on without its own settings: {error}")
                record.changed = {}
        self.active = now = ActiveConversation(store, record, session)
        try:
            now.resume(self.runner, work)
        except BaseException:
            self.drop()
            raise
        return now
