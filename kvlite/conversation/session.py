"""A conversation as someone at a terminal has it: what they typed, and what waits to be read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.history import Branch
from kvlite.conversation.metrics import GenerationMetrics, Piece
from kvlite.conversation.runner import Runner
from kvlite.documents import Document
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import ContextError, SettingError
from kvlite.model.chat_template import BETWEEN, all_of, asked_of, name_of, question_about, tokens_of

# What reads or answers, and whom it calls back meanwhile.
Begin = Callable[[Callbacks], Iterator[Piece]]


@dataclass(frozen=True)
class Message:
    """A message as it was typed, and the documents that went before it."""

    text: str
    documents: tuple[Document, ...] = ()

    @property
    def said(self) -> str:
        """As the model is told it."""
        return question_about(self.documents, self.text) if self.documents else self.text


def _about(documents: Sequence[Document], said: str) -> Message | None:
    """A message about those of the documents that it begins with; None if it is about none."""
    longest, some, rest = sorted(documents, key=lambda each: -len(each.text)), [], said
    while found := next((each for each in longest if rest.startswith(_before(each))), None):
        some.append(found)
        rest = rest.removeprefix(_before(found))
    asked = asked_of(some, "")
    if not some or not rest.startswith(asked):
        return None
    return Message(rest.removeprefix(asked), tuple(some))


def _before(document: Document) -> str:
    return f"{all_of([document])}{BETWEEN}"


class Session:
    """One model, and the conversation with it.

    Attributes:
        runner: the model.
        given: the settings the user began with; a plan may have decided what they left open.
        changed: what the user changed of them since.
        talk: the conversation.
        waiting: documents that the next message will be about.
        last: the account of the last answer.
        places: files that the conversation was saved in or loaded from.
    """

    def __init__(self, runner: Runner, given: Settings) -> None:
        self.runner = runner
        self.given = given
        self.changed: dict[str, Any] = {}
        self.begin()

    def begin(self, **changed: Any) -> None:
        """Begin a new conversation, with some settings changed from now on.

        Raises:
            SettingError: they do not fit; all is as it was.
        """
        talk = self.runner.conversation(**{**self.changed, **changed})
        self.changed |= changed
        self.resume(talk)

    def resume(self, talk: Conversation) -> None:
        """Go on with another conversation, which may have been saved: what was typed, and what
        waits, is told from its documents."""
        self.talk = talk
        self.last: GenerationMetrics | None = None
        self.places: set[Path] = set()
        told = {
            each["content"]
            for way in talk.branches
            for each in way.messages
            if each["role"] == "user"
        }
        found = [message for said in told if (message := _about(talk.documents, said))]
        self._typed = {message.said: message for message in found}
        rest = list(talk.documents)  # of which the same may be there twice
        for each in (each for message in found for each in message.documents):
            if each in rest:
                rest.remove(each)
        branches = [*enumerate(talk.history.branches)]
        self._left = {
            at: self._ahead(branch, rest) for at, branch in branches if branch.prefilled_ids
        }
        ahead = [each for waiting in self._left.values() for each in waiting]
        own = self._left.pop(talk.history.current, [])
        self.waiting = own + [each for each in rest if each not in ahead]

    def _ahead(self, branch: Branch, rest: Sequence[Document]) -> list[Document]:
        """The documents that were read ahead on a branch: those that no message is about, or some
        that one on another branch is."""
        text = self.runner.tokenizer.decode(branch.prefilled_ids)
        said = [each for message in self.typed(branch.messages) for each in message.documents]
        others = [each for each in self.talk.documents if each not in said]
        return [each for each in rest if name_of(each) in text] or [
            each for each in others if name_of(each) in text
        ]

    def change(self, **values: Any) -> None:
        """Change settings of this conversation, from the next message on; one that was saved keeps
        the others it was saved with.

        Raises:
            SettingError: they are unknown, out of range, or do not fit each other.
        """
        settings = self.talk.settings.after_load(values)
        Conversation(self.runner.model, settings)  # which checks them
        self.talk.settings = settings
        self.changed |= values

    @property
    def messages(self) -> list[Message]:
        """The user's, in order."""
        return self.typed(self.talk.messages)

    def typed(self, messages: Sequence[dict[str, str]]) -> list[Message]:
        """The user's among these, as they were typed."""
        told = (each["content"] for each in messages if each["role"] == "user")
        return [self._typed.get(said, Message(said)) for said in told]

    def message(self, number: int | None) -> tuple[int, Message]:
        """A message and its number, from 1; the last one if None is given.

        Raises:
            SettingError: there is no such message.
        """
        messages = self.messages
        number = len(messages) if number is None else number
        if not messages:
            raise SettingError("nothing has been said yet")
        if not 1 <= number <= len(messages):
            raise SettingError(f"there is no message {number}: give 1 to {len(messages)}")
        return number, messages[number - 1]

    def read(self, documents: Sequence[Document], callbacks: Callbacks) -> bool:
        """Take documents for the next message.

        Returns:
            Whether they were read; if not, they will be with the message: it decides what stays of
            them, or others wait before them.

        Raises:
            ContextError: they do not fit the model's trained context.
            Stopped: `callbacks.cancel` was set; nothing of them was read.
        """
        text = all_of(documents)
        if self.waiting:
            self._require_room(text)
            read = False
        else:
            read = self.talk.read_ahead(text, callbacks=callbacks)
        self.waiting += documents
        self.talk.documents = (*self.talk.documents, *documents)
        return read

    def _require_room(self, text: str) -> None:
        most, seen = self.runner.shape.max_context, self.talk.cache.seen
        new = tokens_of(self.runner.tokenizer, text, most)
        if seen + new >= most:
            raise ContextError(
                f"{new:,} more tokens do not fit this model, which was trained for {most:,}, of "
                f"which {seen:,} are read: ask about a part of the document, or begin a new "
                "conversation"
            )

    def say(self, text: str) -> Begin:
        """What answers a new message."""
        message = Message(text, tuple(self.waiting))

        def begin(callbacks: Callbacks) -> Iterator[Piece]:
            pieces = self.talk.stream(message.said, callbacks=callbacks)
            return self._heard(pieces, lambda: self._sent(message))

        return begin

    def _sent(self, message: Message) -> None:
        self._typed[message.said] = message
        self.waiting = []

    def regenerate(self) -> Begin:
        """What answers the last message again."""
        number, message = self.message(None)

        def begin(callbacks: Callbacks) -> Iterator[Piece]:
            self._leave()
            pieces = self.talk.regenerate(callbacks=callbacks)
            return self._again(number, message, pieces)

        return begin

    def check(self) -> Begin:
        """What answers the last message from all that was read; the conversation stays as it is."""
        self.message(None)

        def begin(callbacks: Callbacks) -> Iterator[Piece]:
            return self.talk.check(callbacks=callbacks)

        return begin

    def edit(self, number: int, text: str) -> Begin:
        """What answers message `number` in other words, about the same documents."""
        _, former = self.message(number)
        message = Message(text, former.documents)

        def begin(callbacks: Callbacks) -> Iterator[Piece]:
            self._leave()
            pieces = self.talk.edit(number, message.said, callbacks=callbacks)
            self._typed[message.said] = message
            return self._again(number, message, pieces)

        return begin

    def _again(self, number: int, message: Message, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Another answer; if there is none, the message is not said, and its documents wait."""
        try:
            yield from self._heard(pieces)
        except BaseException:
            if len(self.messages) < number:
                self.waiting = [*message.documents, *self.waiting]
            raise

    def _heard(
        self, pieces: Iterator[Piece], begun: Callable[[], None] | None = None
    ) -> Iterator[Piece]:
        """An answer, whose account is kept."""
        for piece in pieces:
            if begun is not None:
                begun()
                begun = None
            self.last = piece.metrics
            yield piece

    def undo(self, callbacks: Callbacks) -> None:
        """Go back before the last message, whose documents wait for the next one.

        Raises:
            SettingError: there is nothing to undo.
            Stopped: while something was read again, as for `switch`.
        """
        _, message = self.message(None)
        self._leave()
        with self._moving():
            self.talk.undo(callbacks=callbacks)
        self.waiting = [*message.documents, *self.waiting]

    def branch(self, number: int, callbacks: Callbacks) -> None:
        """Go back to just after the answer to message `number`: documents that were read before the
        next one wait again.

        Raises:
            SettingError: there is no such message, or nothing was said since.
            Stopped: while something was read again, as for `switch`.
        """
        messages = self.messages
        self._leave()
        with self._moving():
            self.talk.branch(number, callbacks=callbacks)
        self.waiting = list(messages[number].documents)

    def switch(self, number: int, callbacks: Callbacks) -> None:
        """Go to a branch, counted from 1; what waited there when it was left waits again.

        Raises:
            Stopped: while it was read again; the conversation is on a branch of its own, and
                nothing waits there.
        """
        self._leave()
        with self._moving():
            self.talk.switch(number - 1, callbacks=callbacks)
        self.waiting = self._left.pop(number - 1, [])

    def _leave(self) -> None:
        """Remember what waits on this branch, of which some may have been read ahead."""
        self._left[self.talk.history.current] = [*self.waiting]

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Around going back, which may end half-way."""
        before = self.talk.history.current
        try:
            yield
        except BaseException:
            if self.talk.history.current != before:
                self.waiting = []
            raise
