"""A conversation that a server answers: how it is kept, and what it tells of its answers."""

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from kvlite.config.atomic_file import replaced
from kvlite.config.settings import LOADING, Settings
from kvlite.errors import SettingError, SnapshotError
from kvlite.web.openai_client import ServerAnswer, Upstream
from kvlite.web.server_talk import Said, ServerTalk, Turn
from kvlite.web.work import PAUSE, Shown, Work

from ..storage.record import Record, StoredMessage, branches_of, first_words, keys_of
from ..storage.store import ConversationStore
from .open_conversation import Begin

# What the page always shows, so that answers are by it whatever a server does otherwise.
_ALWAYS = {"model", "temperature", "max_new_tokens"}
_SAID = TypeAdapter(Said)


class ServerHost:
    """Answers by a server: nothing of a conversation stays in memory."""

    pause, beside = PAUSE, True

    def __init__(self, settings: Settings, upstream: Upstream) -> None:
        self.settings = settings
        self._upstream = replace(upstream, given=upstream.given | _ALWAYS)

    def load(self, settings: Settings, work: Work) -> str:
        """Have another of the server's models answer."""
        self.settings = settings
        return ""

    def opened(self, store: ConversationStore, id: str, work: Work) -> "ServerConversation":
        """The conversation, with what was said in it."""
        record = store.record_or_new(id)
        return ServerConversation(store, record, self.settings, self._upstream)


class ServerConversation:
    """A conversation that a server answers, with what is kept of it."""

    def __init__(
        self, store: ConversationStore, record: Record, usual: Settings, upstream: Upstream
    ) -> None:
        self.record, self._store = record, store
        try:
            settings = usual.replace({**record.began, **record.changed})
        except SettingError:  # they are another version's
            settings, record.changed = usual, {}
        self._settings = settings
        self.session = ServerTalk(upstream, settings, self._said(), record.changed)

    def answer(self, work: Work, begin: Begin, reading_s: float = 0.0) -> None:
        """Show an answer as it comes, and keep what the server says of it."""
        started, first_s, answer = time.monotonic(), 0.0, None
        for answer in begin(work.callbacks):
            if not first_s:
                first_s = time.monotonic() - started
            work.show(title="", text=answer.text)
        if answer is None:
            return
        said = _stored(self.session.said.turns)
        with suppress(OSError):  # the user learns of a full disk when the conversation is kept
            account = _account(answer, first_s, said[-2].text)
            self._store.keep_account(self.record.id, keys_of(said)[-1], account)

    def keep(self) -> None:
        """Write it to disk; the record comes last, as it is what people see."""
        record, store, said = self.record, self._store, self.session.said
        try:
            with store.changing(record.id) as kept:  # in which nobody deletes it
                store.place(record.id).mkdir(parents=True, exist_ok=True)
                with replaced(store.served(record.id), private=True) as file:
                    file.write(_SAID.dump_json(said))
                kept.name = kept.name or record.name  # it may have been renamed
                self._update(kept)
        except SettingError:
            if store.is_gone(record.id):
                return
            raise
        except OSError as error:
            raise SnapshotError(
                f"this conversation cannot be written, and what was said last is lost: {error}; "
                "make room on the disk"
            ) from error
        self.record = kept

    def glance(self, shown: Shown) -> None:
        """There are no figures of a server."""

    def look(self) -> None:
        """There are none afterwards, either."""

    def _update(self, record: Record) -> None:
        said = self.session.said
        record.draft, record.changed = self.record.draft, dict(self.session.changed)
        record.began = record.began or {
            name: value for name, value in vars(self._settings).items() if name not in LOADING
        }
        record.said, record.used = _stored(said.turns), time.time()
        record.model = self._settings.model
        record.waiting = [document.name for document in said.waiting]
        record.branches, record.elsewhere = branches_of(
            [_stored(turns) for turns in said.branches], said.current
        )

    def _said(self) -> Said:
        """What was said before.

        Raises:
            SnapshotError: it cannot be read, or not gone on with here.
        """
        record, path = self.record, self._store.served(self.record.id)
        if path.is_file():
            try:
                return _SAID.validate_json(path.read_bytes())
            except (OSError, ValueError):
                raise SnapshotError(
                    f"{path} is damaged: what was said can still be exported"
                ) from None
        if record.said or record.documents or record.branches:
            raise SnapshotError(
                f"{record.title} was had with a model here: end the app, and begin it without "
                "--server to go on with it"
            )
        return Said()


def _stored(turns: tuple[Turn, ...]) -> list[StoredMessage]:
    """What was said, as people see it."""
    found = list[StoredMessage]()
    for turn in turns:
        names = tuple(document.name for document in turn.message.documents)
        found.append(StoredMessage("user", turn.message.text, names))
        found.append(StoredMessage("assistant", turn.answer))
    return found


def _account(answer: ServerAnswer, first_s: float, question: str) -> dict[str, Any]:
    """What a server tells of an answer, and how long its first token took from here."""
    brief = f"{answer.line()} · first token {first_s:.1f} s"
    if answer.finish_reason == "length":
        brief += " · cut at the longest answer"
    return {"brief": brief, "told": [f"Answered by {brief}."], "question": first_words(question)}
