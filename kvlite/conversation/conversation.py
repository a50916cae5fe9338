"""A conversation: messages, their answers, and ways back to any of them."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

from kvlite.cache import KVCache
from kvlite.config.arguments import path_of, require_callable, require_text, token_list
from kvlite.config.settings import Settings
from kvlite.conversation import snapshot
from kvlite.conversation.branch import Branch, BranchView, Message, Node
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.context import Context
from kvlite.conversation.exclusive import alone, alone_by_steps, at_step, by_steps
from kvlite.conversation.history import History
from kvlite.conversation.metrics import Answer, Piece
from kvlite.conversation.reasoning import reasoning_notes
from kvlite.conversation.sources import with_sources
from kvlite.conversation.together import ask_each
from kvlite.conversation.turn import Turn
from kvlite.conversation.verify import checked
from kvlite.documents import Document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks, Progress, require_callbacks
from kvlite.errors import KvliteError, SettingError
from kvlite.methods.engine_config import EngineConfig, require_meanings
from kvlite.model.answers.thinking import thinking_variables
from kvlite.model.chat_template import all_of, certain, goes_on, said_tokens, text_tokens
from kvlite.model.load import LoadedModel
from kvlite.model.text_limit import tokenized
from kvlite.offload import HostKVStore


class Conversation:
    """Turns on one context that stays compressed, in words or in tokens.

    Messages in words go through the model's chat template; they can be edited, regenerated and
    left for other branches. Only one thread at a time may use a conversation: a second one is
    refused with a SettingError.

    Attributes:
        answering: whether an answer is going on; whatever would change the conversation is refused.
        busy: held while a call is at work.
        config: the settings of the next turn, parsed.
        context: everything read, as tokens.
        documents: the documents it is about; saved with it.
        history: everything said, on all branches.
    """

    def __init__(self, model: LoadedModel, settings: Settings | EngineConfig) -> None:
        """Start empty.

        Raises:
            SettingError: the method, the budget or the bits are invalid or do not fit each other,
                or the method needs a calibration of this model.
        """
        self.config = require_meanings(settings)
        self.config.method.fitted(model.shape, model.calibration)
        self.busy, self.answering = Lock(), False
        self.model = model
        self.context = Context(model)
        self.documents: tuple[Document, ...] = ()
        self.history = History(self.context)
        self._noted: Settings | None = None

    @property
    def settings(self) -> Settings:
        """The settings of the next turn. Setting invalid ones raises SettingError."""
        return self.config.settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self.config = self.config.changed(settings)

    @property
    def cache(self) -> KVCache:
        """The keys and values held on the device."""
        return self.context.cache

    @property
    def store(self) -> HostKVStore | None:
        """Everything that was read, if turns recall."""
        return self.context.store

    @property
    def token_ids(self) -> list[int]:
        """Every token in the cache, in order. An answer's last token joins with the next turn."""
        return self.context.token_ids

    @property
    def messages(self) -> list[Message]:
        """The messages and answers in words; of the last answer, what has come so far."""
        return self._branch.messages

    @property
    def branches(self) -> list[BranchView]:
        """All branches, the oldest first."""
        return [BranchView(each.messages, each is self._branch) for each in self.history.branches]

    @property
    def _branch(self) -> Branch:
        return self.history.branch

    @alone
    def read(self, content: str | Sequence[int], *, callbacks: Callbacks = NO_CALLBACKS) -> None:
        """Read text or token ids without answering.

        Args:
            content: read without the chat template. Control tokens spelled out in a text are read
                as plain characters; give token ids to have real ones. What exceeds the budget is
                dropped now, before any question is known: to ask about a text, put both in one
                message to `stream`.
            callbacks: follow the reading and can cancel it. Errors are those of `generate`.
        """
        if isinstance(content, str):
            tokenizer, most = self.model.tokenizer, self.model.shape.max_context
            encode = partial(text_tokens, tokenizer, content, first=not self.token_ids)
            ids = tokenized(encode, tokenizer, content, most, callbacks.cancel)
        else:
            ids = token_list(content)
        if ids:
            self.history.end_step(self.config)
            ids = [*self.context.pending_ids, *ids]
            self.history.read(self.history.next_turn(ids, self.config, answers=False), callbacks)

    @alone
    def read_ahead(self, text: str, *, callbacks: Callbacks = NO_CALLBACKS) -> bool:
        """Read the beginning of the next message, say a document, before its question is known.

        `stream` then only reads the rest of that message. Errors are those of `read`.

        Returns:
            Whether it was read. It is not if that could drop what the question needs.
        """
        require_text(text)
        if self._branch.prefilled_ids:
            raise SettingError("something was read ahead already: say what goes on from it")
        self.history.end_step(self.config)
        ahead = certain(lambda some: self._said(self.settings, some, callbacks.cancel), text)
        if not ahead:
            return False
        turn = self.history.next_turn([*self._unread, *ahead], self.config, answers=False)
        exact = turn.store is not None and turn.turn_config.method.prefilling.exact
        if turn.turn_config.loses and not exact:
            return False
        start = self.history.next_start(self.config)
        self.history.read(turn, callbacks, start)
        self._branch.prefilled_ids, self._branch.prefill_start = ahead, start
        return True

    @alone
    def forget_ahead(self, *, callbacks: Callbacks = NO_CALLBACKS) -> None:
        """Forget what was read ahead, if anything was. Errors are those of `undo`."""
        self.history.forget_ahead(self.config, callbacks)

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        ignore_eos: bool = False,
        callbacks: Callbacks = NO_CALLBACKS,
        **settings: Any,
    ) -> Answer:
        """Read `token_ids` (at least one) and answer.

        Args:
            ignore_eos: go on past the model's end-of-text tokens.
            callbacks: as for `read`; `cancel` also ends the answer.
            settings: for this turn only, e.g. `max_new_tokens`.

        Raises:
            ContextError: the tokens do not fit the model's trained context; nothing was read.
            SettingError: a setting is unknown or out of range; nothing was read.
            Stopped: `cancel` was set while reading; nothing was read.
        """
        answer = self.stream_tokens(
            token_ids, ignore_eos=ignore_eos, callbacks=callbacks, **settings
        )
        pieces = list(answer)
        return Answer(
            "".join(piece.text for piece in pieces),
            [piece.token_id for piece in pieces if piece.token_id is not None],
            pieces[-1].metrics,
        )

    @alone_by_steps
    def stream_tokens(
        self,
        token_ids: Sequence[int],
        *,
        ignore_eos: bool = False,
        callbacks: Callbacks = NO_CALLBACKS,
        **settings: Any,
    ) -> Iterator[Piece]:
        """`generate`, piece by piece. Close it to have the next turn before its end."""
        chosen = self.config.after_load(settings)
        ids = token_list(token_ids)
        if not ids:
            raise SettingError("there is nothing to answer: give at least one token")
        self.history.end_step(chosen)
        turn = self.history.next_turn([*self.context.pending_ids, *ids], chosen)
        self.history.read(turn, callbacks)
        yield from self.context.answer(
            turn, callbacks.cancel, in_words=False, ignore_eos=ignore_eos
        )

    @alone_by_steps
    def stream(
        self, text: str, *, callbacks: Callbacks = NO_CALLBACKS, **settings: Any
    ) -> Iterator[Piece]:
        """Say `text` as the user, in the model's chat template, and stream the answer.

        Args and errors are those of `generate`; errors are raised with the first piece.
        """
        said = self._read(text, callbacks, self.config.after_load(settings))
        yield from self._answered(*said, callbacks.cancel)

    def ask_each(
        self, texts: Sequence[str], *, callbacks: Callbacks = NO_CALLBACKS, **settings: Any
    ) -> Iterator[tuple[int, Piece | KvliteError]]:
        """What `stream` would answer to each of these messages alone, as far as memory allows in
        the same decode steps. The conversation stays as it is. See `together.ask_each`."""
        return ask_each(self, texts, callbacks, settings)

    @alone_by_steps
    def regenerate(
        self, *, callbacks: Callbacks = NO_CALLBACKS, **settings: Any
    ) -> Iterator[Piece]:
        """Answer the last message again; the former answer stays on a branch of its own. Without
        a temperature the answer is the same.

        Args and errors are those of `stream`; after an error the message is gone from this branch.
        """
        chosen = self.config.after_load(settings)
        nodes = self._branch.nodes
        self._branch.require(len(nodes))
        last = nodes[-1]
        turn = self.history.redraw(chosen, callbacks)
        if turn is None:
            node, turn = self._read(last.text, callbacks, chosen)
        else:
            node = self.history.say(last.start, last.text)
        yield from self._answered(node, turn, callbacks.cancel)

    @alone_by_steps
    def continue_answer(
        self, *, callbacks: Callbacks = NO_CALLBACKS, **settings: Any
    ) -> Iterator[Piece]:
        """Go on with the last answer where it was stopped, or came to a limit; errors are
        those of `stream`, and SettingError if it ended by itself, or is held to a schema."""
        turn = self.history.continue_answer(self.config.after_load(settings), callbacks)
        yield from self._answered(self._branch.nodes[-1], turn, callbacks.cancel)

    def check(self, *, callbacks: Callbacks = NO_CALLBACKS, **settings: Any) -> Iterator[Piece]:
        """Answer the last message again from a cache that drops nothing. The conversation does not
        change. Args and errors are those of `verify.checked`."""
        require_callbacks(callbacks)
        return by_steps(self, checked(self, callbacks, **settings))

    @alone_by_steps
    def edit(
        self, number: int, text: str, *, callbacks: Callbacks = NO_CALLBACKS, **settings: Any
    ) -> Iterator[Piece]:
        """Replace user message `number`, counted from 1, and answer it. The former message and all
        that followed stay on a branch of their own.

        Args and errors are those of `stream`; after an error this branch ends before the message.
        """
        chosen = self.config.after_load(settings)
        require_text(text)
        number = self._branch.require(number)
        start = self._branch.nodes[number - 1].start
        ids = self._said(chosen.settings, text, callbacks.cancel, start)
        if start.prefill_start is not None and not goes_on(ids, start.prefilled_ids):
            start = start.prefill_start
        self.history.seek(number - 1, start, chosen, callbacks)
        yield from self._answered(*self._read(text, callbacks, chosen), callbacks.cancel)

    @alone
    def undo(self, *, callbacks: Callbacks = NO_CALLBACKS) -> str:
        """Forget the last user message, its answer and all that was read since. What was read
        ahead of the message stays.

        Returns:
            The message.

        Raises:
            SettingError: there is no message.
            Stopped, OutOfMemory: as `switch`; then nothing is forgotten.
        """
        self._branch.require(len(self._branch.nodes))
        return self.history.undo(self.config, callbacks).text

    @alone
    def branch(self, number: int, *, callbacks: Callbacks = NO_CALLBACKS) -> None:
        """Go back to just after the answer to user message `number`, counted from 1. What was said
        since stays on a branch of its own.

        Raises:
            SettingError: there is no such message, or nothing was said since.
            Stopped, OutOfMemory: as `switch`.
        """
        number, nodes = self._branch.require(number), self._branch.nodes
        if number == len(nodes):
            raise SettingError(f"message {number} is the last one: nothing was said since")
        self.history.seek(number, nodes[number].start, self.config, callbacks)

    @alone
    def switch(self, branch: int, *, callbacks: Callbacks = NO_CALLBACKS) -> None:
        """Go to one of the `branches`. What only that branch has is read again, unless a
        checkpoint holds it.

        Raises:
            SettingError: there is no such branch.
            Stopped, OutOfMemory: while reading; the conversation then is where the two branches
                part, or at an earlier message, on a branch of its own.
        """
        self.history.switch(branch, self.config, callbacks)

    def save(
        self,
        path: str | Path,
        *,
        light: bool = False,
        progress: Progress | None = None,
        most: int | None = None,
    ) -> int:
        """Write it to a file that `Runner.open` goes on from; returns the bytes written. Of an
        answer that is still going on, what has come so far is saved. Args and errors are those of
        `snapshot.save`."""
        require_callable(progress, "progress")
        with at_step(self):
            if not light:
                self.history.give_up_reading()
            return snapshot.save(path_of(path), self, progress, most, light=light)

    def _read(self, text: str, callbacks: Callbacks, chosen: EngineConfig) -> tuple[Node, Turn]:
        require_text(text)
        self.history.end_step(chosen)
        ids = self.message_ids(text, chosen.settings, callbacks.cancel)
        self.context.watches = bool(self.documents)
        turn = self.history.next_turn(ids, chosen)
        if self.history.half_read is None:
            self.watch(turn, text)
        start = self.history.next_start(chosen)
        self.history.read(turn, callbacks, start)
        self.history.prompt = self.context.checkpoint(chosen, answering=True)
        return self.history.say(start, text), turn

    def _answered(self, node: Node, turn: Turn, cancel: Event | None) -> Iterator[Piece]:
        said = self.history.said
        with closing(self.context.answer(turn, cancel)) as pieces:
            for piece in pieces:
                node.hear(piece)
                yield with_sources(piece, self.context, said, self.documents, turn.settings)

    @property
    def _unread(self) -> list[int]:
        # The template closes an answer itself, so a stop token is left out.
        pending, ends = self.context.pending_ids, self.model.stop_ids
        templated = self.model.tokenizer.chat_template is not None and self._branch.tip is not None
        return [token for token in pending if not templated or token not in ends]

    def _said(
        self, settings: Settings, text: str, cancel: Event | None, at: Checkpoint | None = None
    ) -> list[int]:
        branch, model = self._branch, self.model
        number, read, ahead = len(branch.nodes), len(self.token_ids), branch.prefilled_ids
        if at is not None:
            number, read, ahead = at.number, at.seen, at.prefilled_ids
        encode = partial(
            said_tokens,
            model.tokenizer,
            text,
            opening=not number,
            first=read == len(ahead),
            system=settings.system,
            variables=thinking_variables(settings.thinking),
        )
        return tokenized(encode, model.tokenizer, text, model.shape.max_context, cancel)

    def watch(self, turn: Turn, text: str) -> None:
        """Let the turn of a message say which of its documents could not be read whole, and once
        which settings of reasoning change nothing; and find what its answer looks at."""
        documents = (each for each in self.documents if each.note and all_of([each]) in text)
        former, self._noted = self._noted, turn.settings
        unheard = reasoning_notes(self.model, turn.settings, former)
        turn.note((*(each.note for each in documents), *unheard))
        turn.watch()

    def message_ids(self, text: str, settings: Settings, cancel: Event | None) -> list[int]:
        """The tokens to read if `text` is said now: what is pending of the last answer, and of the
        message what has not been read ahead. Errors are those of `stream`."""
        ids, ahead = self._said(settings, text, cancel), self._branch.prefilled_ids
        if not ids:
            raise SettingError("there is nothing to answer: say something")
        if not goes_on(ids, ahead):
            raise SettingError("the message does not begin with what was read ahead")
        return [*self._unread, *ids[len(ahead) :]]
