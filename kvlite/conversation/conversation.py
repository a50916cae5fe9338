"""A conversation: what is said and answered, and gone back to."""

from collections.abc import Iterator
from functools import partial
from threading import Event
from typing import Any

from kvlite.config.arguments import require_text
from kvlite.conversation.exclusive import alone, alone_by_steps
from kvlite.conversation.history import Branch, BranchView, Message, Position
from kvlite.conversation.metrics import Piece
from kvlite.conversation.token_conversation import TokenConversation
from kvlite.conversation.turn import Turn
from kvlite.conversation.verify import Answered, checked
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.errors import SettingError
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.chat_template import all_of, certain, goes_on, said_tokens


class Conversation(TokenConversation):
    """A conversation in words, in the model's chat template: messages that can be edited, answered
    again and left for other branches."""

    @property
    def messages(self) -> list[Message]:
        """The turns that went through the chat template; the last answer as far as it was heard."""
        return self._branch.messages

    @property
    def branches(self) -> list[BranchView]:
        """Its branches, in the order in which they were begun."""
        return self.history.views

    @alone
    def read_ahead(
        self,
        text: str,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> bool:
        """Read what the user's next message will begin with: a document, before the first question
        about it is there. Only what differs is read when that is said to `stream`.

        Args and errors are those of `read`.

        Returns:
            Whether it was read. It is not where something would be lost that the question might
            want.
        """
        require_text(text)
        if self._branch.prefilled_ids:
            raise SettingError("something was read ahead already: say what goes on from it")
        self.context.end_step(self.config)
        ahead = certain(partial(self._said, cancel=callbacks.cancel), text)
        ids, turn = [*self._unread, *ahead], None
        if ahead:
            turn = self.history.next_turn(ids, self.config, answers=False)
        if turn is None or (
            turn.turn_config.loses
            and (turn.store is None or not turn.turn_config.method.prefilling.exact)
        ):
            return False
        start = self.history.next_position(self.config)
        self.history.read(turn, callbacks, start)
        self._branch.prefilled_ids, self._branch.prefill_start = ahead, start
        return True

    @alone_by_steps
    def stream(
        self,
        text: str,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Say `text` as the user, in the model's chat template, and stream the answer.

        Args and errors are those of `generate`; they are raised when the first piece is asked for.
        """
        yield from self._stream(text, callbacks, self.config.after_load(settings))

    @alone_by_steps
    def regenerate(
        self,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Answer the last message again; the former answer stays, on a branch of its own. Without a
        temperature it is the same.

        Args and errors are those of `stream`; if it fails, the message is not said on this branch.
        """
        chosen = self.config.after_load(settings)
        nodes = self._branch.nodes
        self._branch.require(len(nodes))
        last = nodes[-1]
        turn = self.history.redraw(chosen, callbacks)
        if turn is None:
            yield from self._stream(last.text, callbacks, chosen)
        else:
            yield from self._answered(last.start, last.text, turn, callbacks.cancel)

    @alone_by_steps
    def check(
        self,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Answer the last message again from a cache that drops nothing, drawn as the answer was;
        the conversation stands as before, whatever becomes of it.

        Args and errors are those of `verify.checked`.
        """
        told = Answered(self.context, self._branch, self.history.prompt, self.config)
        return checked(told, callbacks, **settings)

    @alone_by_steps
    def edit(
        self,
        number: int,
        text: str,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Say user message `number`, counted from 1, in other words; what was said from there on
        stays, on a branch of its own.

        Args and errors are those of `stream`; if it fails, nothing is said from there on on this
        branch.
        """
        chosen = self.config.after_load(settings)
        require_text(text)
        number = self._branch.require(number)
        start = self._branch.nodes[number - 1].start
        ids = self._said(text, at=start, cancel=callbacks.cancel)
        if start.prefill_start is not None and not goes_on(ids, start.prefilled_ids):
            start = start.prefill_start
        self.history.seek(number - 1, start, chosen, callbacks)
        yield from self._stream(text, callbacks, chosen)

    @alone
    def undo(
        self,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> str:
        """Go back before the last message of the user's, which is forgotten with its answer and all
        that was read since. What was read ahead of it stays read.

        Returns:
            The message.

        Raises:
            SettingError: there is none.
            Stopped, OutOfMemory: as `switch`; then nothing is forgotten.
        """
        self._branch.require(len(self._branch.nodes))
        return self.history.undo(self.config, callbacks).text

    @alone
    def branch(
        self,
        number: int,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        """Go back to just after the answer to user message `number`, counted from 1; what was said
        since stays, on a branch of its own.

        Raises:
            SettingError: there is no such message, or nothing was said since.
            Stopped, OutOfMemory: as `switch`.
        """
        number, nodes = self._branch.require(number), self._branch.nodes
        if number == len(nodes):
            raise SettingError(f"message {number} is the last one: nothing was said since")
        self.history.seek(number, nodes[number].start, self.config, callbacks)

    @alone
    def switch(
        self,
        branch: int,
        *,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        """Go on with one of the `branches`. What it has beyond the one that is left is read again,
        unless the cache was copied.

        Raises:
            SettingError: there is no such branch.
            Stopped, OutOfMemory: while that was read; then the conversation stands where the two
                part, or at a message before, on a branch of its own.
        """
        self.history.switch(branch, self.config, callbacks)

    @property
    def _branch(self) -> Branch:
        return self.history.branch

    def _stream(self, text: str, callbacks: Callbacks, chosen: EngineConfig) -> Iterator[Piece]:
        require_text(text)
        self.context.end_step(chosen)
        turn = self.history.next_turn(
            [*self._unread, *self._after_ahead(text, callbacks.cancel)], chosen
        )
        turn.note(self._not_read(text))
        start = self.history.next_position(chosen)
        self.history.read(turn, callbacks, start)
        self.history.prompt = self.context.checkpoint_prompt(chosen)
        yield from self._answered(start, text, turn, callbacks.cancel)

    def _answered(
        self, start: Position, text: str, turn: Turn, cancel: Event | None
    ) -> Iterator[Piece]:
        """Stream the answer to a message that was read."""
        node = self.history.say(start, text)
        for piece in self.context.answer(turn, ignore_eos=False, cancel=cancel):
            node.answer += piece.text
            yield piece

    @property
    def _unread(self) -> list[int]:
        """What of the last answer goes before a new message: the template closes it itself."""
        if self.model.tokenizer.chat_template is None or self._branch.tip is None:
            return self.context.pending_ids
        return [token for token in self.context.pending_ids if token not in self.model.stop_ids]

    def _said(
        self, text: str, *, at: Position | None = None, cancel: Event | None = None
    ) -> list[int]:
        """The tokens of a user message.

        Args:
            at: where it is said; None for now.

        Raises:
            ContextError: it cannot fit the model.
            Stopped: `cancel` was set.
        """
        number, read = len(self._branch.nodes), len(self.token_ids)
        ahead = self._branch.prefilled_ids
        if at is not None:
            number, read, ahead = at.number, at.checkpoint.seen, at.prefilled_ids
        opening, first = not number, read == len(ahead)
        tokenizer, system = self.model.tokenizer, self.settings.system
        encode = partial(said_tokens, tokenizer, text, opening=opening, first=first, system=system)
        return self._tokenized(encode, text, cancel)

    def _not_read(self, text: str) -> tuple[str, ...]:
        """What of the documents in a message was not read."""
        lacking = (each for each in self.documents if each.note)
        return tuple(each.note for each in lacking if all_of([each]) in text)

    def _after_ahead(self, text: str, cancel: Event | None) -> list[int]:
        """The tokens of a new user message that have not been read ahead.

        Raises:
            SettingError: it does not begin with what was.
        """
        ids, ahead = self._said(text, cancel=cancel), self._branch.prefilled_ids
        if not ids:
            raise SettingError("there is nothing to answer: say something")
        if not goes_on(ids, ahead):
            raise SettingError("the message does not begin with what was read ahead")
        return ids[len(ahead) :]
