"""A conversation as users see it: the messages they typed, documents waiting for the next, and
files: of conversations as Markdown for people, or to go on from."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import Any

from kvlite.config.atomic_file import replaced
from kvlite.config.paths import SUFFIX
from kvlite.config.settings import Settings
from kvlite.conversation.branch import Branch
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.convert import open_library
from kvlite.conversation.entries import Entry, add_conversation, entries, entry_named
from kvlite.conversation.library import Library, Writer, a_name
from kvlite.conversation.message import Message, as_typed, numbered
from kvlite.conversation.metrics import GenerationMetrics, Piece
from kvlite.conversation.record import Record
from kvlite.conversation.runner import Runner
from kvlite.conversation.sources import Source
from kvlite.documents import Document
from kvlite.engine.callbacks import Callbacks, Progress
from kvlite.errors import ContextError, SettingError, SnapshotError
from kvlite.model.chat_template import all_of, name_of, tokens_of

# Starts an answer.
Begin = Callable[[Callbacks], Iterator[Piece]]

_MARKDOWN = (".md", ".markdown")
_FORCE = " --force"
_THERE = (
    "{name} is there already, and is not this conversation: give another name, or replace it with "
    "/save {name}{force}"
)


def saved_as(name: str) -> tuple[Path, Entry | None]:
    """The file of a saved conversation, and its entry in the library if it is there. Raises
    SettingError if there is none of this name, and SnapshotError if it cannot be gone on with."""
    path = Path(name).expanduser()
    if path.suffix.lower() in _MARKDOWN:
        raise SettingError(f"{name} is text for people: what the model held is not in it")
    if path.suffix.lower() == SUFFIX:
        return path, None
    entry = entry_named(open_library(), name)
    if entry.about is None:
        raise SnapshotError(
            entry.flaw or f"{name} was had with a server: `kvlite app --server` goes on with it"
        )
    return entry.about.path, entry


class Session:
    """A model and the current conversation with it, `talk`.

    Attributes:
        given: the settings the user began with.
        changed: what the user changed of them since.
        waiting: documents that the next message will be about.
        places: files that the conversation was saved in or loaded from.
        entry: its record in the library, if it has one; no other program writes it meanwhile.
    """

    def __init__(self, runner: Runner, given: Settings) -> None:
        self.runner, self.given, self.talk = runner, given, runner.conversation()
        self.changed: dict[str, Any] = {}
        self.entry: Record | None = None
        self._writer: Writer | None = None
        self._last: Piece | None = None
        self.resume(self.talk)

    @cached_property
    def library(self) -> Library:
        """Where it is kept under a name."""
        return open_library()

    @property
    def last(self) -> GenerationMetrics | None:
        """The metrics of the last answer."""
        return None if self._last is None else self._last.metrics

    @property
    def sources(self) -> tuple[Source, ...]:
        """The passages that it came from."""
        return () if self._last is None else self._last.sources

    def begin(self, **changed: Any) -> None:
        """Begin a new conversation, with some settings changed from now on.

        Raises:
            SettingError: they do not fit; nothing is changed.
        """
        talk = self.runner.conversation(**{**self.changed, **changed})
        self.changed |= changed
        self.resume(talk)

    def resume(self, talk: Conversation) -> None:
        """Go on with another conversation, maybe a saved one: what was typed, and what waits, is
        found by its documents."""
        self.talk.history.give_up_reading()  # which it would hold until garbage is looked for
        self.places: set[Path] = set()
        self.leave_library()
        self.go_on(self.runner, self.given, talk)

    def let_go(self) -> None:
        """Hold neither model nor conversation, until it is to `go_on`."""
        del self.runner, self.talk
        self._last = None

    def go_on(self, runner: Runner, given: Settings, talk: Conversation) -> None:
        """Go on with the same conversation as `talk`, which a model that was loaded by the settings
        `given` has read."""
        self.runner, self.given = runner, given
        self.talk, talk.history.keeps_half_read = talk, True
        self._last = None
        told = {node.text for branch in talk.history.branches for node in branch.nodes}
        typed = [as_typed(said, talk.documents) for said in told]
        found = [message for message in typed if message.documents]
        self._typed = {message.said: message for message in found}
        rest = list(talk.documents)  # of which the same may be there twice
        for each in (each for message in found for each in message.documents):
            if each in rest:
                rest.remove(each)
        self._left = {
            at: self._ahead(branch, rest)
            for at, branch in enumerate(talk.history.branches)
            if branch.prefilled_ids
        }
        ahead = [each for waiting in self._left.values() for each in waiting]
        own = self._left.pop(talk.history.current, [])
        self.waiting = own + [each for each in rest if each not in ahead]

    def _ahead(self, branch: Branch, rest: Sequence[Document]) -> list[Document]:
        # Those of no message, or else of another branch's messages.
        text = self.runner.tokenizer.decode(branch.prefilled_ids)
        said = [each for message in self.typed(branch.messages) for each in message.documents]
        others = [each for each in self.talk.documents if each not in said]
        return [each for each in rest if name_of(each) in text] or [
            each for each in others if name_of(each) in text
        ]

    def change(self, **values: Any) -> None:
        """Change settings of this conversation, from the next message on. Raises SettingError if
        they are unknown, out of range, or do not fit each other."""
        config = self.talk.config.after_load(values)
        Conversation(self.runner.model, config)  # checks them
        self.talk.config = config
        self.changed |= values

    @property
    def messages(self) -> list[Message]:
        """The user's messages, in order."""
        return self.typed(self.talk.messages)

    def typed(self, messages: Sequence[dict[str, str]]) -> list[Message]:
        """The user's among `messages`, as typed."""
        told = (each["content"] for each in messages if each["role"] == "user")
        return [self._typed.get(said, Message(said)) for said in told]

    def message(self, number: int | None) -> tuple[int, Message]:
        """A message and its number, counted from 1; None stands for the last one. Raises
        SettingError if there is no such message."""
        return numbered(self.messages, number)

    def read(self, documents: Sequence[Document], callbacks: Callbacks) -> bool:
        """Take documents for the next message; returns whether they were read. If not, they are
        read with the message: it decides what stays of them, or others wait before them. Raises
        ContextError if they do not fit the model's trained context, and Stopped if they were
        cancelled."""
        text = all_of(documents)
        if self.waiting:
            self._require_room(text, callbacks.cancel)
            read = False
        else:
            read = self.talk.read_ahead(text, callbacks=callbacks)
        self.waiting += documents
        self.talk.documents = (*self.talk.documents, *documents)
        return read

    def take_back(self, names: Sequence[str], callbacks: Callbacks) -> None:
        """Forget documents that wait, by their names; others that wait are read with the message.
        Errors are those of `Conversation.forget_ahead`."""
        going = [each for each in self.waiting if each.name in names]
        if going:
            self.talk.forget_ahead(callbacks=callbacks)
            self.waiting = [each for each in self.waiting if each not in going]
            self.talk.documents = tuple(each for each in self.talk.documents if each not in going)

    def _require_room(self, text: str, cancel: Event | None) -> None:
        most, seen = self.runner.shape.max_context, self.talk.cache.seen
        new = tokens_of(self.runner.tokenizer, text, most, cancel)
        if seen + new >= most:
            raise ContextError(
                f"{new:,} more tokens do not fit this model, which was trained for {most:,}, of "
                f"which {seen:,} are read: ask about a part of the document, or begin a new "
                "conversation",
                seen + new,
            )

    def say(self, text: str) -> Begin:
        """Answer a new message."""
        message = Message(text, tuple(self.waiting))

        def begin(callbacks: Callbacks) -> Iterator[Piece]:
            pieces = self._heard(self.talk.stream(message.said, callbacks=callbacks))
            for number, piece in enumerate(pieces):
                if number == 0:  # it was read
                    self._typed[message.said], self.waiting = message, []
                yield piece

        return begin

    def regenerate(self, **settings: Any) -> Begin:
        """Answer the last message again, with settings for this answer alone."""
        number, message = self.message(None)
        return self._again(number, message, partial(self.talk.regenerate, **settings))

    def continue_answer(self) -> Begin:
        """Go on with the last answer, which was stopped or came to a limit."""
        self.message(None)
        return lambda callbacks: self._heard(self.talk.continue_answer(callbacks=callbacks))

    def edit(self, number: int, text: str) -> Begin:
        """Answer message `number` in other words, about the same documents."""
        _, former = self.message(number)
        message = Message(text, former.documents)
        return self._again(number, message, partial(self.talk.edit, number, message.said))

    def _again(
        self, number: int, message: Message, answer: Callable[..., Iterator[Piece]]
    ) -> Begin:
        """Another answer. After an error the message is gone, and its documents wait."""

        def begin(callbacks: Callbacks) -> Iterator[Piece]:
            self._leave()
            self._typed[message.said] = message
            try:
                yield from self._heard(answer(callbacks=callbacks))
            except BaseException:
                if len(self.messages) < number:
                    self.waiting = [*message.documents, *self.waiting]
                raise

        return begin

    def check(self) -> Begin:
        """Answer the last message from all that was read; the conversation does not change."""
        self.message(None)
        return lambda callbacks: self.talk.check(callbacks=callbacks)

    def _heard(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._last = piece
            yield piece

    def undo(self, callbacks: Callbacks) -> None:
        """Go back before the last message; its documents wait for the next one. Errors are those
        of `Conversation.undo`."""
        _, message = self.message(None)
        with self._moving():
            self.talk.undo(callbacks=callbacks)
        self.waiting = [*message.documents, *self.waiting]

    def branch(self, number: int, callbacks: Callbacks) -> None:
        """Go back to just after the answer to message `number`; the next one's documents wait
        again. Errors are those of `Conversation.branch`."""
        messages = self.messages
        with self._moving():
            self.talk.branch(number, callbacks=callbacks)
        self.waiting = list(messages[number].documents)

    def switch(self, number: int, callbacks: Callbacks) -> None:
        """Go to a branch, counted from 1; what waited there when it was left waits again. Errors
        are those of `Conversation.switch`."""
        with self._moving():
            self.talk.switch(number - 1, callbacks=callbacks)
        self.waiting = self._left.pop(number - 1, [])

    def _leave(self) -> None:
        self._left[self.talk.history.current] = [*self.waiting]

    @contextmanager
    def _moving(self) -> Iterator[None]:
        # If that ends half-way, on a branch of its own, nothing waits there.
        self._leave()
        before = self.talk.history.current
        try:
            yield
        except BaseException:
            if self.talk.history.current != before:
                self.waiting = []
            raise

    def save(self, name: str, progress: Progress | None) -> tuple[str, list[str]]:
        """Save the conversation.

        Args:
            name: a path ending in `.md` or `.kv`, or the name of a library entry. With --force
                after it, an existing one is replaced; without, only this conversation's own.
            progress: called with (bytes done, bytes in all).

        Returns:
            Where it is, and the library entries that were removed for it.

        Raises:
            SettingError, SnapshotError: there is nothing to save, or it cannot be written there.
        """
        if not self.talk.messages and not self.waiting:
            raise SettingError("nothing has been said yet, so there is nothing to save")
        name, force = name.removesuffix(_FORCE).rstrip(), name.endswith(_FORCE)
        path = Path(name).expanduser()
        kind = path.suffix.lower()
        if kind not in (SUFFIX, *_MARKDOWN):
            return self._save_in_library(a_name(name), progress, force=force)
        if path.exists() and not force and path.resolve() not in self.places:
            raise SettingError(_THERE.format(name=name, force=_FORCE))
        if kind == SUFFIX:
            self.talk.save(path, progress=progress)
        else:
            self._write_markdown(path)
        self.places.add(path.resolve())
        return str(path), []

    def _save_in_library(
        self, name: str, progress: Progress | None, *, force: bool
    ) -> tuple[str, list[str]]:
        library, record = self.library, self.entry
        if record is None or record.title != name:
            alike = [each for each in entries(library) if each.name == name]
            if alike and not force:
                raise SettingError(_THERE.format(name=name, force=_FORCE))
            ids = [each.id for each in alike if each.id]
            record = Record(ids[0] if len(ids) == 1 else library.new().id, name)
        writer = library.hold(record.id, name)
        try:
            added = add_conversation(library, record, self.talk, self.typed, self.waiting, progress)
        except BaseException:
            writer.release()
            raise
        self.leave_library()
        self.entry, self._writer = record, writer
        return f"{added.name}, in the library", added.removed

    def leave_library(self) -> None:
        """Let other programs write its entry, if it has one."""
        if self._writer is not None:
            self._writer.release()
        self.entry, self._writer = None, None

    def _write_markdown(self, path: Path) -> None:
        try:
            with replaced(path) as file:
                # A file's name may be no text.
                file.write(self.markdown().encode("utf-8", "replace"))
        except OSError as error:
            raise SettingError(f"{path} cannot be written: {error.strerror}") from error

    def markdown(self) -> str:
        """The conversation as Markdown, with its documents by name."""
        messages = iter(self.messages)
        parts = [f"# A conversation with {self.talk.settings.model}"]
        for each in self.talk.messages:
            if each["role"] == "user":
                message = next(messages)
                read = [f"*read {document.name}*" for document in message.documents]
                parts += ["## You", *read, message.text.strip()]
            else:
                parts += ["## Model", each["content"].strip()]
        return "\n\n".join(parts) + "\n"

    def load(
        self, path: Path, entry: Entry | None, progress: Progress | None, reading: Callbacks
    ) -> str:
        """Go on with a saved conversation, or begin one with a document of the library, as
        `saved_as` found it. Errors are those of `Runner.open`; after one the session is as before.

        Returns:
            Why what is said is not written in its place, if it is not.
        """
        writer, why = None, ""
        if entry is not None and entry.is_conversation:
            try:
                writer = self.library.hold(entry.id)
            except SettingError as error:
                why = str(error)
        try:
            talk = self.runner.open(path, progress=progress, reading=reading)
        except BaseException:
            if writer is not None:
                writer.release()
            raise
        self.resume(talk)
        if entry is None:
            self.places.add(path.resolve())
        elif writer is not None:
            self.entry, self._writer = entry.record, writer
        return why
