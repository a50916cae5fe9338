"""What is asked of the model and of the conversations, by all pages and programs.

Everything that needs the model is a piece of `Work` for the engine's thread.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlite.config.paths import data_folder
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.documents import Document
from kvlite.errors import SettingError, SnapshotError, Stopped

from ..storage.record import Record
from ..storage.store import ConversationStore
from .active_conversation import ActiveConversation
from .job import NOTHING, Job, JobRequest, as_shown
from .model_host import ConversationTask, ModelHost
from .thread import Engine
from .uploads import Uploads
from .work import Task, Work

# Pieces of work that have ended and may still be asked about, and conversations of a user that may
# wait at once.
_ENDED, _WAITING = 100, 16
# Seconds that what loses nothing has to end when the app does.
_AT_ONCE = 0.5


class Service:
    """What all pages talk to.

    Attributes:
        engine: the thread that does the work.
        model_host: what it does it with.
        uploads: documents that came, and were not read yet.
    """

    def __init__(self, settings: Settings, root: Path | None = None) -> None:
        """Without a model yet.

        Args:
            root: kvlite's data folder, if not the usual one.
        """
        self.engine = Engine()
        self.model_host = ModelHost(settings)
        self.uploads = Uploads((root or data_folder()) / "app" / "uploads")
        self._root = root
        self._stores: dict[str, ConversationStore] = {}
        self._lock = threading.Lock()
        self._going: dict[tuple[str, str], Job] = {}

    def store(self, owner: str) -> ConversationStore:
        """The conversations of a user, "" where nobody logs in."""
        return self._stores.setdefault(owner, ConversationStore(owner, self._root))

    def under_way(self, owner: str, id: str) -> Job | None:
        """What is being done, or waits to be, for a conversation."""
        job = self.job(owner, id)
        return None if job is None or job.ended else job

    def job(self, owner: str, id: str) -> Job | None:
        """What is done for a conversation, or was last, as far as that is remembered."""
        return self._going.get((owner, id))

    def record(self, owner: str, id: str) -> Record:
        """What people see of a conversation, a new one if there is none: as it is on disk, unless
        there was no room for that."""
        store = self.store(owner)
        now = self.model_host.holds(store, id)
        return store.record_or_new(id) if now is None or now.kept else replace(now.record)

    def shown(self, owner: str, id: str) -> Record:
        """A conversation as people see it now."""
        return as_shown(self.record(owner, id), self.job(owner, id))

    def settings_of(self, owner: str, id: str) -> Settings:
        """What a conversation has now."""
        record, usual = self.record(owner, id), self.model_host.settings
        try:
            return usual.replace({**record.began, **record.changed})
        except SettingError:  # it was had with another version
            return usual

    def require_idle(self, owner: str, id: str) -> None:
        """Raises SettingError if something is being done for a conversation, or waits to be."""
        if self.under_way(owner, id) is not None:
            raise SettingError("an answer is on its way in this conversation: stop it, or wait")

    def _require_few(self, owner: str) -> None:
        """Raises SettingError if too many of a user's conversations are being answered, or wait."""
        waiting = [key for key, job in self._going.items() if key[0] == owner and not job.ended]
        if len(waiting) >= _WAITING:
            raise SettingError(
                f"{len(waiting)} of your conversations wait for an answer already: wait for one of "
                "them, or stop it"
            )

    def load(self, settings: Settings) -> Work:
        """Have a model loaded in the place of the one there is, whose memory is free first."""

        def task(work: Work) -> str:
            return self.model_host.load(settings, work)

        return self.engine.submit(task, "Loading the model", public="the model is being loaded")

    def say(self, owner: str, id: str, text: str, files: Sequence[str] = ()) -> Work:
        """Have uploaded files read, and a message answered if there is one.

        Raises:
            ContextError: the message is longer than the model was trained for.
            DocumentError: a file is none that this user uploaded.
            SettingError: something is being done for the conversation, or too much waits.
        """
        documents, unread = list[Document](), [self.uploads.own(owner, file) for file in files]
        self.model_host.require_fits(text)

        def opened(work: Work) -> None:
            documents.extend(self.uploads.read(file, work, self.model_host) for file in [*unread])

        def task(now: ActiveConversation, work: Work) -> None:
            reading_s = 0.0
            if documents:
                names = ", ".join(document.name for document in documents)
                work.begin(f"Reading {names}")
                now.record.name_after(names)
                begun = time.monotonic()
                if now.session.read(documents, work.callbacks):
                    reading_s = time.monotonic() - begun
                self.uploads.remove(unread)
                unread.clear()
                now.keep()
            if text:
                now.record.name_after(text)
                work.begin("Reading the question" if documents else "Reading")
                now.answer(work, now.session.say(text), reading_s)
                now.record.draft = ""

        sent = JobRequest(text, len(self.record(owner, id).said), unread)
        first = opened if files else None
        return self._with(owner, id, "Reading", task, sent, first)

    def regenerate(self, owner: str, id: str) -> Work:
        """Have the last message answered again; it is the draft if there is no other answer."""

        def task(now: ActiveConversation, work: Work) -> None:
            number, message = now.session.message(None)
            try:
                now.answer(work, now.session.regenerate())
            finally:
                if len(now.session.messages) < number:
                    now.record.draft = message.text

        above = max(0, len(self.record(owner, id).said) - 1)
        return self._with(owner, id, "Answering again", task, JobRequest(above=above))

    def edit(self, owner: str, id: str, number: int, text: str) -> Work:
        """Have message `number`, counted from 1, answered in other words.

        Raises:
            ContextError: they are more than the model was trained for.
            SettingError: there are none; or something is being done for it.
        """
        if not text.strip():
            raise SettingError("a message cannot be empty: type something, or go back before it")
        self.model_host.require_fits(text)

        def task(now: ActiveConversation, work: Work) -> None:
            now.answer(work, now.session.edit(number, text))
            now.record.draft = ""

        above = self.record(owner, id).before(number)
        return self._with(owner, id, "Job back", task, JobRequest(text, above))

    def undo(self, owner: str, id: str) -> Work:
        """Go back before the last message, which is the draft then."""

        def task(now: ActiveConversation, work: Work) -> None:
            _, message = now.session.message(None)
            now.session.undo(work.callbacks)
            now.record.draft = message.text

        return self._with(owner, id, "Job back", task)

    def branch(self, owner: str, id: str, number: int) -> Work:
        """Go back to just after the answer to message `number`, counted from 1."""

        def task(now: ActiveConversation, work: Work) -> None:
            now.session.branch(number, work.callbacks)

        return self._with(owner, id, "Job back", task)

    def switch(self, owner: str, id: str, branch: int) -> Work:
        """Go to a branch, counted from 1."""

        def task(now: ActiveConversation, work: Work) -> None:
            now.session.switch(branch, work.callbacks)

        return self._with(owner, id, "Job to the branch", task, JobRequest(branch=branch))

    def check(self, owner: str, id: str) -> Work:
        """Have the last answer checked; the work makes it anew from everything, beside the
        conversation."""

        def task(now: ActiveConversation, work: Work) -> None:
            for piece in now.session.check()(work.callbacks):
                work.hear(piece)

        return self._with(owner, id, "Answering from everything", task, JobRequest(check=True))

    def require_change(self, owner: str, id: str, values: dict[str, Any]) -> None:
        """Raises a KvliteError if these settings of a conversation cannot change any more, or what
        the model is to be told first is longer than it was trained for."""
        self.model_host.require_fits(str(values.get("system", "")))
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

        def task(now: ActiveConversation, work: Work) -> None:
            now.session.change(**values)
            now.record.changed = dict(now.session.changed)

        def change(work: Work) -> Record:
            self.require_change(owner, id, values)  # something may have been said before its turn
            if self.model_host.holds(store, id) is not None:
                return self.model_host.work(store, id, work, title, task)
            wanted = self.settings_of(owner, id).after_load(values)
            if self.model_host.runner is not None:
                Conversation(self.model_host.runner.model, wanted)  # which checks them
            with store.changing(id) as record:
                record.changed |= values
            return record

        store, title = self.store(owner), "Changing settings"
        return self._submit(store, id, title, change)

    def rename(self, owner: str, id: str, name: str) -> None:
        """Call a conversation otherwise.

        Raises:
            SettingError: the name is empty, or there is no such conversation.
        """
        store = self.store(owner)
        name = store.rename(id, name).name
        if (now := self.model_host.holds(store, id)) is not None:
            now.record.name = name

    def forget(self, owner: str, id: str) -> Work:
        """Delete a conversation: nobody sees it any more, and what the engine has of it goes once
        nothing is done for it.

        Raises:
            SettingError: some of it is still there.
        """

        def task(_: Work) -> None:
            if self.model_host.holds(store, id) is not None:
                self.model_host.drop()
            store.delete(id)  # and what was written meanwhile

        store = self.store(owner)
        with self._lock:
            if (job := self.under_way(owner, id)) is not None:
                job.work.cancel.set()
            if (last := self.job(owner, id)) is not None:
                self.uploads.remove(last.sent.files)
            try:
                store.delete(id)
            finally:
                gone = self.engine.submit(task, "Deleting")
        return gone

    def close(self, patience: float = 5, seconds: float = 60) -> str:
        """End what is being done, and keep the conversation in memory for another day; why that
        cannot be, if so.

        Args:
            patience: seconds that what is being done has to end, where an answer may be lost; it
                may be a library's call that never does.
            seconds: that the conversation has to be kept.
        """
        told = list[str]()

        def last(work: Work) -> None:
            try:
                self.model_host.set_aside(work)
            except SnapshotError as error:
                told.append(
                    f"The last answer is lost, as it cannot be written: {error.__cause__ or error}."
                )
            for store in self._stores.values():
                store.sweep()

        now = self.engine.current
        # While a model is loaded there is no answer to lose.
        loses = self.model_host.active is not None and (now is None or not now.public)
        if not self.engine.close(last, patience if loses else _AT_ONCE, seconds) and loses:
            told.append("What was being done did not end in time; an answer may be lost.")
        return " ".join(told)

    def _with(
        self,
        owner: str,
        id: str,
        title: str,
        task: ConversationTask,
        sent: JobRequest = NOTHING,
        first: Task | None = None,
    ) -> Work:
        """Have a conversation worked on, which is in memory then and on disk afterwards."""
        store = self.store(owner)

        def whole(work: Work) -> Record:
            return self.model_host.work(store, id, work, title, task, sent.text)

        return self._submit(store, id, title, whole, sent, first)

    def _submit(
        self,
        store: ConversationStore,
        id: str,
        title: str,
        whole: Task,
        sent: JobRequest = NOTHING,
        first: Task | None = None,
    ) -> Work:
        """Have something done for a conversation, one thing at a time.

        Args:
            sent: whose text is kept from now on until it is answered.
            first: as of `Engine.submit`.
        """
        store.place(id)  # which refuses what is no id
        key = store.owner, id

        def failed(work: Work) -> None:
            if is_new and (work.abandoned or not isinstance(work.failure, Stopped)):
                store.discard(id)

        with self._lock:
            self.require_idle(*key)
            self._require_few(store.owner)
            store.require_there(id)
            is_new = not store.has(id)
            if sent.text:
                store.keep_draft(id, sent.text)
            work = self.engine.submit(whole, title, first, failed=failed)
            rest = {each: job for each, job in self._going.items() if each != key}
            ended = [each for each, job in rest.items() if job.ended]
            for each in ended[: max(0, len(ended) - _ENDED)]:
                del rest[each]
            self._going = {**rest, key: Job(work, sent)}
        return work
