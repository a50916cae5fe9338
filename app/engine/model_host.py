"""One model, and the conversation that is with it now; others wait on disk.

One conversation is in memory at a time, so that what the plan and the OOM policy say of memory
holds; another is set aside for it, and opened again in about a second."""

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.conversation.runner import Runner, open_runner
from kvlite.conversation.session import Session
from kvlite.errors import ContextError, SettingError, SnapshotError
from kvlite.model.calibration import Calibration
from kvlite.model.making import load_transformers
from kvlite.model.source import find_model
from kvlite.model.text_limit import require_fits, text_limit
from kvlite.planner.usage import Holding, holding

from ..storage.record import Record
from ..storage.store import ConversationStore
from .accounts import PageFinder
from .active_conversation import ActiveConversation
from .device_memory import held_now, release_memory
from .work import PAUSE, Work

ConversationTask = Callable[[ActiveConversation, Work], Any]
# Characters of a text while there is no model.
_LONGEST = 4_000_000
# Seconds between two looks at an answer where looking takes from computing.
_SLOWLY = 0.3


class ModelHost:
    """What the engine's thread works with; others only look.

    Attributes:
        settings: what the model is loaded with, and conversations begin with.
        runner: the model, None while there is none.
        holding: what it holds while no conversation is in memory.
        open: the conversation in memory.
    """

    def __init__(self, settings: Settings) -> None:
        """Without a model yet."""
        self.settings = settings
        self.runner: Runner | None = None
        self.holding = Holding(())
        self.active: ActiveConversation | None = None
        self._text_limit = 0

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

    @property
    def text_limit(self) -> int | None:
        """The most characters that can fit the model; None while there is none."""
        return self._text_limit if self.runner is not None else None

    def require_fits(self, text: str, cancel: Event | None = None) -> None:
        """Refuse a text that is too long for the model there is, or for any if there is none yet,
        before it waits, is kept, or is read.

        Raises:
            ContextError: it is too long.
            Stopped: `cancel` was set.
        """
        runner, most = self.runner, self.text_limit
        if runner is not None and (most is None or len(text) <= most):
            require_fits(runner.model.tokenizer, text, runner.shape.max_context, cancel)
        elif len(text) > (most or _LONGEST):
            raise ContextError(
                f"{len(text):,} characters are more than the {most or _LONGEST:,} that can fit "
                "the model: ask about a part of it, split it, or choose a model with a longer "
                "context"
            )

    def held_bytes(self) -> int:
        """What the model there is holds of its device."""
        runner = self.runner
        return 0 if runner is None else held_now(runner.model.device)

    def holds(self, store: ConversationStore, id: str) -> ActiveConversation | None:
        """A conversation, if it is the one in memory."""
        now = self.active
        return now if now is not None and now.is_of(store, id) else None

    def work(
        self,
        store: ConversationStore,
        id: str,
        work: Work,
        title: str,
        task: ConversationTask,
        draft: str = "",
    ) -> Record:
        """Work on a conversation, which is in memory then and on disk afterwards.

        Args:
            title: what is done first, once it is in memory.
            draft: a message that is sent, until it is answered.
        """
        now = self._opened(store, id, work)
        now.record.draft = draft or now.record.draft
        work.heed = now.glance
        work.begin(title)
        try:
            task(now, work)
        except BaseException:
            if store.has(id):  # what was refused makes no conversation
                with suppress(SnapshotError):  # that it went wrong comes first
                    now.keep()
            raise
        else:
            now.keep()
        finally:
            work.heed = None
            now.look()
        return now.record

    def load(self, settings: Settings, work: Work) -> str:
        """Load a model, once it is found; what became of the former one's memory, in a sentence."""
        load_transformers()
        find_model(settings.model, work.begin, work.cancel)
        self.set_aside(work)
        freed = ""
        if self.runner is not None:
            device, before = self.runner.model.device, self.held_bytes()
            self.runner = None
            name = Path(self.settings.model).name
            freed = f"{name} is gone, {readable(release_memory(device, before))} are free again"
            work.note(freed)
        work.begin(f"Loading {Path(settings.model).name}")
        runner = open_runner(settings, notify=work.begin, cancel=work.cancel)
        self.holding = holding(runner.model)
        self._text_limit = text_limit(runner.model.tokenizer, runner.shape.max_context)
        self.runner = runner
        self.settings = settings
        return freed

    def set_aside(self, work: Work) -> None:
        """Let the conversation in memory go to disk, with its cache if there is room."""
        if self.active is not None:
            self.active.set_aside(work)
            self.drop()

    def drop(self) -> None:
        """Let go of the conversation in memory."""
        self.active = None
        gc.collect()

    def _opened(self, store: ConversationStore, id: str, work: Work) -> ActiveConversation:
        """The conversation, in memory."""
        if self.runner is None:
            self.load(self.settings, work)
        assert self.runner is not None
        if (now := self.holds(store, id)) is not None:
            return now
        self.set_aside(work)
        record = store.record_or_new(id)
        session = Session(self.runner, self.settings)
        if record.changed:
            try:
                session.begin(**record.changed)
            except SettingError as error:  # they are another version's, or another model's
                work.note(f"{record.title} goes on without its own settings: {error}")
                record.changed = {}
        self.active = now = ActiveConversation(store, record, session, PageFinder(session))
        try:
            now.resume(self.runner, work)
        except BaseException:
            self.active = None
            raise
        return now
