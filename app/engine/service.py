"""What pages and programs ask of the model and of conversations.

Everything that needs the model is a piece of `Work` for the engine's thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlite.config.paths import data_folder
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.convert import open_library
from kvlite.conversation.library import Library
from kvlite.conversation.record import Record
from kvlite.documents import Document
from kvlite.errors import SettingError, SnapshotError
from kvlite.web.engine_thread import Engine
from kvlite.web.work import NOTHING, Task, Work, WorkRequest

from .active_conversation import ActiveConversation
from .model_host import ModelHost
from .parts import parts_for
from .read_ahead import forget_refused, known, wait_for
from .server_conversation import ServerConversation, ServerHost
from .uploads import Uploads

# How many pieces of work that have ended are remembered, and how many conversations of a user may
# wait at once.
_ENDED, _WAITING = 100, 16
# Seconds that work has to end when the app does, if nothing is lost with it.
_AT_ONCE = 0.5


Opened = ActiveConversation | ServerConversation
ConversationTask = Callable[[Opened, Work], Any]


class Service:
    """What all pages talk to: `host` answers, be it the model here (`model_host`) or a server."""

    def __init__(
        self,
        settings: Settings,
        root: Path | None = None,
        *,
        reads_ahead: bool = True,
        host: ServerHost | None = None,
    ) -> None:
        """Without a model yet.

        Args:
            root: kvlite's data folder, if not the usual one.
            reads_ahead: whether documents are read while their question is typed.
            host: what answers, if not a model that is loaded here.
        """
        self.engine = Engine()
        self.model_host = ModelHost(settings)
        self.host: ModelHost | ServerHost = host or self.model_host
        self.uploads = Uploads((root or data_folder()) / "app" / "uploads")
        self.reads_ahead = reads_ahead
        self._root = root
        self._stores: dict[str, Library] = {}
        self._lock = threading.Lock()
        self.loading: Work | None = None
        self._works: dict[tuple[str, str], Work] = {}
        self.ahead: dict[tuple[str, str], Work] = {}

    @property
    def model_name(self) -> str:
        """The model's name, without the path to it."""
        return Path(self.host.settings.model).name

    def store(self, owner: str) -> Library:
        """The conversations of a user; "" where nobody logs in."""
        if owner not in self._stores:
            self._stores[owner] = open_library(owner, self._root)
        return self._stores[owner]

    def work_for(self, owner: str, id: str) -> Work | None:
        """What is being done for a conversation, or was done last."""
        return self._works.get((owner, id))

    def under_way(self, owner: str, id: str) -> Work | None:
        """What is being done for a conversation, or waits to be."""
        work = self.work_for(owner, id)
        return None if work is None or work.shown.ended else work

    def record(self, owner: str, id: str) -> Record:
        """A conversation's record, a new one if there is none; from memory if not written."""
        store = self.store(owner)
        now = self.model_host.holds(store, id)
        return store.record_or_new(id) if now is None or now.kept else replace(now.record)

    def shown(self, owner: str, id: str) -> Record:
        """A conversation as people see it now: the message being answered is its draft, and what
        that replaces is gone."""
        record, work = self.record(owner, id), self.under_way(owner, id)
        if work is None:
            return replace(record, draft="")
        request = work.request
        waiting = [*record.waiting, *request.documents]
        above = record.said[: request.above]
        return replace(record, said=above, draft=request.text, waiting=list(dict.fromkeys(waiting)))

    def settings_of(self, owner: str, id: str) -> Settings:
        """The settings of a conversation."""
        record, usual = self.record(owner, id), self.host.settings
        try:
            return usual.replace({**record.began, **record.changed})
        except SettingError:  # they are another version's
            return usual

    def busy(self, owner: str) -> list[str]:
        """The ids of a user's conversations that something is being done for, or waits to be."""
        works = self._works.items()
        return [key[1] for key, work in works if key[0] == owner and not work.shown.ended]

    def require_idle(self, owner: str, id: str) -> None:
        """Raises SettingError if something is being done for a conversation, or waits to be."""
        if self.under_way(owner, id) is not None:
            raise SettingError("an answer is on its way in this conversation: stop it, or wait")

    def load(self, settings: Settings) -> Work:
        """Load another model in place of the one there is, which stays if the other is refused."""

        def task(work: Work) -> str:
            told = self.host.load(settings, work)
            for other in self._works.values():
                if other.shown.ended:  # what it was refused for may be gone
                    other.show(error="")
            for key in [*self.ahead]:
                forget_refused(self.ahead, key)
            return told

        self.loading = self.engine.submit(
            task,
            "Loading the model",
            public="the model is being loaded",
        )
        return self.loading

    def stop_loading(self) -> None:
        """End what `load` began last; the former model comes back with the next message."""
        if self.loading is not None:
            self.loading.cancel.set()

    def say(
        self,
        owner: str,
        id: str,
        text: str,
        files: Sequence[str] = (),
        *,
        ahead: bool = False,
        parts: bool = False,
    ) -> Work:
        """Read uploaded files, and answer a message if there is one, or (`ahead`) will be. What was
        read ahead is not read again. With `parts`, of files that are too long the parts are read
        that a text search finds for the message. Raises a KvliteError if the message is too long, a
        file is not this user's or could not be read, or too much waits already."""
        if parts:
            forget_refused(self.ahead, (owner, id))
        before = self.ahead.get((owner, id))
        if before is not None and before.ended.is_set():
            before = None
        read = known(self.ahead.get((owner, id)), files)
        documents = list[Document]()
        unread = [self.uploads.own(owner, file) for file in files if file not in read]
        self.model_host.require_fits(text)
        pending = [*(read if before is not None else ()), *unread]
        reading_s = 0.0

        def opened(work: Work) -> None:
            nonlocal reading_s
            if before is not None:
                reading_s = wait_for(before, work)
                pending[:] = unread
            settings = self.settings_of(owner, id)
            for file in [*unread]:
                documents.append(
                    self.uploads.read(file, work, self.model_host, settings, whole=not parts)
                )

        def task(now: Opened, work: Work) -> None:
            nonlocal reading_s
            if documents:
                if parts:
                    documents[:] = parts_for(now.session, documents, text)
                names = ", ".join(document.name for document in documents)
                work.begin(f"Reading {names}")
                begun = time.monotonic()
                if now.session.read(documents, work.callbacks):
                    reading_s += time.monotonic() - begun
                if not ahead:  # it may yet be sent elsewhere
                    self.uploads.remove([*read, *unread])
                unread.clear()
                pending.clear()
                now.keep()
            elif read and not ahead:
                self.uploads.remove(read)
            if text:
                now.record.name_after(text)
                work.begin("Reading the question" if documents else "Reading")
                now.answer(work, now.session.say(text), reading_s)
                now.record.draft = ""

        names = tuple(Path(file).name for file in files)
        request = WorkRequest(text, len(self.record(owner, id).said), pending, names)
        if ahead:
            request = replace(request, ahead=(*read, *unread))
        first = opened if unread or before is not None else None
        work = self.work_on(owner, id, "Reading", task, request, first, before)
        self.ahead.pop((owner, id), None)
        if ahead:
            self.ahead[owner, id] = work
        return work

    def continue_answer(self, owner: str, id: str) -> Work:
        """Go on with the last answer, which was stopped or came to a limit."""

        def task(now: Opened, work: Work) -> None:
            begin = now.session.continue_answer()
            last = now.record.said[-1]
            work.show(text=last.text, reasoning=last.reasoning)
            now.answer(work, begin)

        above = max(0, len(self.record(owner, id).said) - 1)
        return self.work_on(owner, id, "Going on", task, WorkRequest(above=above))

    def regenerate(self, owner: str, id: str, **settings: Any) -> Work:
        """Answer the last message again, with settings for this answer alone. If that fails, and no
        other answer is left, it becomes the draft."""

        def task(now: Opened, work: Work) -> None:
            number, message = now.session.message(None)
            try:
                now.answer(work, now.session.regenerate(**settings))
            finally:
                if len(now.session.messages) < number:
                    now.record.draft = message.text

        above = max(0, len(self.record(owner, id).said) - 1)
        return self.work_on(owner, id, "Answering again", task, WorkRequest(above=above))

    def edit(self, owner: str, id: str, number: int, text: str) -> Work:
        """Answer message `number`, counted from 1, in other words."""
        if not text.strip():
            raise SettingError("a message cannot be empty: type something, or go back before it")
        self.model_host.require_fits(text)

        def task(now: Opened, work: Work) -> None:
            now.answer(work, now.session.edit(number, text))
            now.record.draft = ""

        request = WorkRequest(text, self.record(owner, id).before(number))
        return self.work_on(owner, id, "Going back", task, request)

    def undo(self, owner: str, id: str) -> Work:
        """Go back before the last message, which becomes the draft."""

        def task(now: Opened, work: Work) -> None:
            _, message = now.session.message(None)
            now.session.undo(work.callbacks)
            now.record.draft = message.text

        return self.work_on(owner, id, "Going back", task)

    def branch(self, owner: str, id: str, number: int) -> Work:
        """Go back to just after the answer to message `number`, counted from 1."""
        return self.work_on(
            owner, id, "Going back", lambda now, work: now.session.branch(number, work.callbacks)
        )

    def switch(self, owner: str, id: str, branch: int) -> Work:
        """Go to a branch, counted from 1."""
        return self.work_on(
            owner,
            id,
            "Going to the branch",
            lambda now, work: now.session.switch(branch, work.callbacks),
            WorkRequest(branch=branch),
        )

    def check(self, owner: str, id: str) -> Work:
        """Answer the last message from all that was read; the conversation stays as it is."""

        def task(now: Opened, work: Work) -> None:
            for piece in now.session.check()(work.callbacks):
                work.hear(piece)

        return self.work_on(owner, id, "Answering from everything", task, WorkRequest(check=True))

    def require_change(self, owner: str, id: str, values: dict[str, Any]) -> None:
        """Raises a KvliteError if the system prompt cannot change any more, or is longer than the
        model was trained for."""
        self.model_host.require_fits(str(values.get("system", "")))
        if "system" in values and self.record(owner, id).said:
            raise SettingError(
                "what the model is told first cannot change once something was said: begin a "
                "new conversation for it"
            )

    def change(self, owner: str, id: str, values: dict[str, Any]) -> Work:
        """Change settings of a conversation, from its next message on."""
        self.require_change(owner, id, values)
        store, title = self.store(owner), "Changing settings"

        def task(now: Opened, work: Work) -> None:
            now.session.change(**values)
            now.record.changed = dict(now.session.changed)

        def change(work: Work) -> Record:
            self.require_change(owner, id, values)  # something may have been said meanwhile
            if self.model_host.holds(store, id) is not None:
                return self.host.opened(store, id, work).do(title, task, work)
            wanted = self.settings_of(owner, id).after_load(values)
            if self.model_host.runner is not None:
                Conversation(self.model_host.runner.model, wanted)  # which checks them
            with store.changing(id) as record:
                record.changed |= values
            return record

        return self._submit(store, id, title, change)

    def rename(self, owner: str, id: str, name: str) -> None:
        """Name a conversation."""
        store = self.store(owner)
        name = store.rename(id, name).name
        if (now := self.model_host.holds(store, id)) is not None:
            now.record.name = name

    def forget(self, owner: str, id: str) -> Work:
        """Delete a conversation. Nobody sees it any more unless it is restored; the engine frees
        what it has of it once nothing is done for it. Raises SettingError if part of it could not
        be removed."""
        store = self.store(owner)

        def task(_: Work) -> None:
            if store.is_gone(id) and self.model_host.holds(store, id) is not None:
                self.model_host.drop()
            store.sweep()

        with self._lock:
            if (last := self.work_for(owner, id)) is not None:
                last.cancel.set()
                self.uploads.remove(last.request.files)
            try:
                store.delete(id)
            finally:
                gone = self.engine.submit(task, "Deleting")
        return gone

    def close(self, patience: float = 5, seconds: float = 60) -> str:
        """End what is being done, and keep the conversation in memory for another day; a sentence
        if that takes too many `seconds`, or cannot be. Work is given up after `patience` seconds,
        even if an answer may be lost: a library's call may never return."""
        told = list[str]()

        def last(work: Work) -> None:
            try:
                self.model_host.set_aside(work)
            except SnapshotError as error:
                told.append(
                    f"The last answer is lost, as it cannot be written: {error.__cause__ or error}."
                )
            if self.model_host.lent is not None:
                self.model_host.lent.current.release()
            for store in self._stores.values():
                store.close()

        now = self.engine.current
        # While a model is loaded there is no answer to lose.
        loses = self.model_host.active is not None and (now is None or not now.public)
        loses |= self.host.beside
        if not self.engine.close(last, patience if loses else _AT_ONCE, seconds) and loses:
            told.append("What was being done did not end in time; an answer may be lost.")
        return " ".join(told)

    def work_on(
        self,
        owner: str,
        id: str,
        title: str,
        task: ConversationTask,
        request: WorkRequest = NOTHING,
        first: Task | None = None,
        after: Work | None = None,
    ) -> Work:
        """Work on a conversation, which is in memory then and on disk afterwards."""
        store = self.store(owner)

        def whole(work: Work) -> Record:
            return self.host.opened(store, id, work).do(title, task, work)

        return self._submit(store, id, title, whole, request, first, after)

    def _submit(
        self,
        store: Library,
        id: str,
        title: str,
        whole: Task,
        request: WorkRequest = NOTHING,
        first: Task | None = None,
        after: Work | None = None,
    ) -> Work:
        """Do something for a conversation, one thing at a time; it may wait for what it comes
        `after`. The text of the request is kept as the draft from now on."""
        store.place(id)  # which refuses what is no id
        key = store.owner, id

        def failed(work: Work) -> None:
            if is_new and work.abandoned:
                store.discard(id)

        with self._lock:
            if after is None or self.under_way(*key) is not after:
                self.require_idle(*key)
            if (waiting := len(self.busy(store.owner))) >= _WAITING:
                raise SettingError(
                    f"{waiting} of your conversations wait for an answer already: wait for one of "
                    "them, or stop it"
                )
            store.require_there(id)
            is_new = not store.has(id)
            if request.text:
                store.keep_draft(id, request.text)
            work = self.engine.submit(
                whole, title, first, failed=failed, request=request, beside=self.host.beside
            )
            rest = {each: other for each, other in self._works.items() if each != key}
            for each in [each for each, other in rest.items() if other.shown.ended][:-_ENDED]:
                del rest[each]
            self._works = {**rest, key: work}
        return work
