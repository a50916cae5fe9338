"""A conversation that a server answers: how it is kept, and what it tells of its answers."""

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from kvlite.config.atomic_file import replaced
from kvlite.config.checked_file import Damaged, sound
from kvlite.config.settings import Settings
from kvlite.conversation.library import Library
from kvlite.conversation.record import Record, StoredMessage, first_words, keys_of
from kvlite.errors import SettingError, SnapshotError
from kvlite.web.server_api import ServerAnswer, Upstream
from kvlite.web.server_talk import Said, ServerTalk, Turn
from kvlite.web.work import PAUSE, Work

from .open_conversation import Begin, OpenConversation

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

    def opened(self, store: Library, id: str, work: Work) -> "ServerConversation":
        """The conversation, with what was said in it."""
        record = store.record_or_new(id)
        return ServerConversation(store, record, self.settings, self._upstream)


class ServerConversation(OpenConversation[ServerTalk]):
    """A conversation that a server answers, with what is kept of it."""

    unwritten = (
        "{name} cannot be written, and what was said last is lost: {error}; make room on the disk"
    )

    def __init__(self, store: Library, record: Record, usual: Settings, upstream: Upstream) -> None:
        try:
            settings = usual.replace({**record.began, **record.changed})
        except SettingError:  # they are another version's
            settings, record.changed = usual, {}
        said = _said_before(store, record)
        super().__init__(store, record, ServerTalk(upstream, settings, said, record.changed))

    def answer(self, work: Work, begin: Begin, reading_s: float = 0.0) -> None:
        """Show an answer as it comes, and keep what the server says of it."""
        started, first_s, answer = time.monotonic(), 0.0, None
        for answer in begin(work.callbacks):
            if not first_s:
                first_s = time.monotonic() - started
            thought = {"reasoning": answer.reasoning, "reasoning_tokens": answer.reasoning_tokens}
            work.show(title="", text=answer.text, **thought)
        if answer is None:
            return
        said = _stored(self.session.said.turns)
        with suppress(OSError):  # the user learns of a full disk when the conversation is kept
            account = _account(answer, first_s, said[-2].text)
            self.store.keep_account(self.record.id, keys_of(said)[-1], account)

    def _said(self) -> tuple[list[list[StoredMessage]], int]:
        said = self.session.said
        return [_stored(turns) for turns in said.branches], said.current

    def _write(self) -> None:
        with replaced(self.store.served(self.record.id), private=True) as file:
            file.write(_SAID.dump_json(self.session.said))


def _said_before(store: Library, record: Record) -> Said:
    path = store.served(record.id)
    if path.is_file():
        try:
            with sound():
                return _SAID.validate_json(path.read_bytes())
        except (OSError, Damaged):
            raise SnapshotError(f"{path} is damaged: what was said can still be exported") from None
    if record.said or record.documents or record.branches:
        raise SnapshotError(
            f"{record.title} was had with a model here: end the app, and begin it without "
            "--server to go on with it"
        )
    return Said()


def _stored(turns: tuple[Turn, ...]) -> list[StoredMessage]:
    found = list[StoredMessage]()
    for turn in turns:
        names = tuple(document.name for document in turn.message.documents)
        found.append(StoredMessage("user", turn.message.text, names))
        thought = turn.reasoning, turn.reasoning_tokens
        found.append(StoredMessage("assistant", turn.answer, (), *thought))
    return found


def _account(answer: ServerAnswer, first_s: float, question: str) -> dict[str, Any]:
    brief = f"{answer.line()} · first token {first_s:.1f} s"
    if answer.finish_reason == "length":
        brief += " · cut at the longest answer or as the context is full: ask it to go on"
    return {"brief": brief, "told": [f"Answered by {brief}."], "question": first_words(question)}
