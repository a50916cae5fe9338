"""A conversation: what was said and answered, on one context that stays compressed."""

from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from threading import Event
from typing import Any

from kvlite import snapshot
from kvlite.audience import Audience, Notify
from kvlite.branches import Branch, Message, Path, Said
from kvlite.cache import KVCache, parse_kv_bits
from kvlite.checkpoint import checkpoint_limit
from kvlite.context import Context
from kvlite.documents import Document
from kvlite.engine.reading import Progress
from kvlite.errors import SettingError
from kvlite.held import Held
from kvlite.ledger import Answer, Piece
from kvlite.memory.ladder import Ladder
from kvlite.methods.amount import method_and_amount
from kvlite.model.load import LoadedModel
from kvlite.offload import Tier
from kvlite.offload.room import ram_limit
from kvlite.prompts import certain, goes_on, said_tokens, text_tokens, token_list
from kvlite.settings import Settings
from kvlite.tensorfile import Progress as Saving
from kvlite.turn import Turn
from kvlite.ways import Ways


class Conversation:
    """Turns of one conversation. Not safe for use from several threads at once.

    Attributes:
        context: what was read, as tokens.
        documents: what it is about, for whoever saves it, and quotes from it once it is opened.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        """Start empty.

        Raises:
            SettingError: the method, the budget or the bits are none, they do not fit each other,
                or the method needs a calibration of the model.
        """
        parse_kv_bits(settings.kv_bits)
        ram_limit(settings.recall_limit, 0)
        checkpoint_limit(settings.checkpoint_limit)
        method, _ = method_and_amount(settings.method, settings.budget)
        method.fitted(model.shape, model.calibration)
        self.model = model
        self.settings = settings
        self.context = Context(model)
        self.documents: tuple[Document, ...] = ()
        self.ways = Ways(self.context)

    @property
    def messages(self) -> list[Message]:
        """The turns that went through the chat template; the last answer as far as it was heard."""
        return self._path.messages

    @property
    def cache(self) -> KVCache:
        """Keys and values held."""
        return self.context.cache

    @property
    def tier(self) -> Tier | None:
        """Everything that was read, if turns recall."""
        return self.context.tier

    @property
    def ladder(self) -> Ladder:
        """What was given up when memory ran out."""
        return self.context.ladder

    @property
    def token_ids(self) -> list[int]:
        """Every token in the cache, in order; an answer's last one follows with the next turn."""
        return self.context.token_ids

    @property
    def branches(self) -> list[Branch]:
        """The ways it went, in the order in which they were begun."""
        return self.ways.branches

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of host memory that it takes to go back without reading again."""
        return self.context.checkpoint_bytes

    @property
    def planned_peak_bytes(self) -> int:
        """What live tensors were expected to come to in the last turn; 0 if that is not known."""
        turn = self.context.turn
        return 0 if turn is None else turn.account.planned or 0

    def read(
        self,
        content: str | Sequence[int],
        *,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
    ) -> None:
        """Read text or token ids without answering.

        Args:
            content: taken as it is; no chat template is applied. What does not fit the budget is
                dropped now, chosen without a question: to ask about a text, say both in one
                message to `stream`.
            progress, cancel: as in `engine.prefill.prefill`.
            notify: told what the ledger will note, a sentence each, before anything is read.

        Raises:
            ContextError: it does not fit the model's trained context.
            SettingError: a token is not in the model's vocabulary.
            Stopped: `cancel` was set; nothing of it was read.
        """
        if isinstance(content, str):
            ids = text_tokens(self.model.tokenizer, content, first=not self.token_ids)
        else:
            ids = token_list(content)
        if ids:
            self.context.end_step(self.settings)
            ids = [*self.context.pending, *ids]
            turn = self.ways.next_turn(ids, self.settings, answers=False)
            self.ways.take(turn, Audience(progress, notify, cancel))

    def read_ahead(
        self,
        text: str,
        *,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
    ) -> bool:
        """Read what the user's next message will begin with: a document, before the first question
        about it is there. Only what differs is read when that is said to `stream`.

        Args and errors are those of `read`.

        Returns:
            Whether it was read. It is not where something would be lost that the question might
            want.
        """
        if self._path.ahead:
            raise SettingError("something was read ahead already: say what goes on from it")
        self.context.end_step(self.settings)
        ahead = certain(self._said, text)
        ids, turn = [*self._unread, *ahead], None
        if ahead:
            turn = self.ways.next_turn(ids, self.settings, answers=False)
        if turn is None or (turn.loses and (turn.tier is None or not turn.method.exact)):
            return False
        before = self.ways.standing(self.settings)
        self.ways.take(turn, Audience(progress, notify, cancel), before)
        self._path.ahead, self._path.before = ahead, before
        return True

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        ignore_eos: bool = False,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
        **settings: Any,
    ) -> Answer:
        """Read `token_ids` (at least one) and answer.

        Args:
            ignore_eos: go on past the model's end-of-text tokens.
            progress, cancel: as in `engine.prefill.prefill`; `cancel` also ends the answer.
            notify: as in `read`.
            settings: override the conversation's for this turn, e.g. `max_new_tokens`.

        Raises:
            ContextError: the tokens do not fit the model's trained context; nothing was read.
            SettingError: a setting is unknown or out of range; nothing was read.
            Stopped: `cancel` was set while reading; nothing was read.
        """
        pieces = list(
            self.stream_tokens(
                token_ids,
                ignore_eos=ignore_eos,
                progress=progress,
                notify=notify,
                cancel=cancel,
                **settings,
            )
        )
        return Answer(
            "".join(piece.text for piece in pieces),
            [piece.token_id for piece in pieces if piece.token_id is not None],
            pieces[-1].ledger,
        )

    def stream_tokens(
        self,
        token_ids: Sequence[int],
        *,
        ignore_eos: bool = False,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """`generate`, piece by piece. A new turn ends one that is still being answered."""
        chosen = self.settings.after_load(settings)
        ids = token_list(token_ids)
        if not ids:
            raise SettingError("there is nothing to answer: give at least one token")
        self.context.end_step(chosen)
        turn = self.ways.next_turn([*self.context.pending, *ids], chosen)
        self.ways.take(turn, Audience(progress, notify, cancel))
        yield from self.context.answer(turn, ignore_eos=ignore_eos, cancel=cancel)

    def stream(
        self,
        text: str,
        *,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Say `text` as the user, in the model's chat template, and stream the answer.

        Args and errors are those of `generate`; they are raised when the first piece is asked for.
        """
        chosen = self.settings.after_load(settings)
        self.context.end_step(chosen)
        turn = self.ways.next_turn([*self._unread, *self._after_ahead(text)], chosen)
        said = self.ways.standing(chosen)
        self.ways.take(turn, Audience(progress, notify, cancel), said)
        self.ways.unanswered = self.context.hold_answering(chosen)
        yield from self._answered(said, text, turn, cancel)

    def regenerate(
        self,
        *,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Answer the last message again; the former answer stays, on a branch of its own. Without a
        temperature it is the same.

        Args and errors are those of `stream`; if it fails, the message is not said on this branch.
        """
        chosen, number = self.settings.after_load(settings), len(self._path.said)
        self._path.require(number)
        said = self._path.said[-1]
        text = self.messages[said.messages]["content"]
        left, turn = self.ways.answer_again(number - 1, chosen)
        if turn is not None:
            yield from self._answered(said, text, turn, cancel)
            return
        self.ways.go_back(left, said, chosen, Audience(progress, notify, cancel))
        yield from self.stream(text, progress=progress, notify=notify, cancel=cancel, **settings)

    def edit(
        self,
        number: int,
        text: str,
        *,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Say user message `number`, counted from 1, in other words; what was said from there on
        stays, on a branch of its own.

        Args and errors are those of `stream`; if it fails, nothing is said from there on on this
        branch.
        """
        chosen = self.settings.after_load(settings)
        self._path.require(number)
        said, audience = self._path.said[number - 1], Audience(progress, notify, cancel)
        ids = self._said(text, after=said)
        if said.before is not None and not goes_on(ids, said.ahead):
            said = said.before
        self.ways.go_back(self.ways.leave(number - 1, chosen), said, chosen, audience)
        yield from self.stream(text, progress=progress, notify=notify, cancel=cancel, **settings)

    def undo(
        self,
        *,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
    ) -> str:
        """Go back before the last message of the user's, which is forgotten with its answer and all
        that was read since. What was read ahead of it stays read.

        Returns:
            The message.

        Raises:
            SettingError: there is none.
            Stopped, OutOfMemory: as `switch`; then nothing is forgotten.
        """
        path, audience = self._path, Audience(progress, notify, cancel)
        path.require(len(path.said))
        return path.messages[self.ways.undo(self.settings, audience).messages]["content"]

    def branch(
        self,
        number: int,
        *,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
    ) -> None:
        """Go back to just after the answer to user message `number`, counted from 1; what was said
        since stays, on a branch of its own.

        Raises:
            SettingError: there is no such message, or nothing was said since.
            Stopped, OutOfMemory: as `switch`.
        """
        self._path.require(number)
        if number == len(self._path.said):
            raise SettingError(f"message {number} is the last one: nothing was said since")
        said, left = self._path.said[number], self.ways.leave(number, self.settings)
        self.ways.go_back(left, said, self.settings, Audience(progress, notify, cancel))

    def switch(
        self,
        branch: int,
        *,
        progress: Progress | None = None,
        notify: Notify | None = None,
        cancel: Event | None = None,
    ) -> None:
        """Go on with one of the `branches`. What it has beyond the one that is left is read again,
        unless the cache was copied.

        Raises:
            SettingError: there is no such branch.
            Stopped, OutOfMemory: while that was read; then the conversation stands where the two
                part, or at a message before, on a branch of its own.
        """
        self.ways.switch(branch, self.settings, Audience(progress, notify, cancel))

    def save(
        self, path: str | FilePath, *, progress: Saving | None = None, most: int | None = None
    ) -> int:
        """Write it to a file, from which `Runner.open` goes on with it; its bytes. An answer that
        is still going on is saved as far as it was heard. Args and errors are those of
        `snapshot.save` and `held`."""
        return snapshot.save(FilePath(path), self.held(), self.model, self.settings, progress, most)

    def held(self) -> Held:
        """All that the next turn goes on from, as it stands: not copied.

        Raises:
            InterruptedCacheError: a step was interrupted, and nothing can go on from that.
        """
        context = self.context
        context.end_step(self.settings)
        if context.tier is None:
            context.cache.require_whole()
        return Held(
            cache=context.cache,
            tier=context.tier,
            token_ids=context.token_ids,
            paths=self.ways.paths,
            at=self.ways.at,
            documents=self.documents,
            pending=context.pending,
            noted=context.noted,
            given_up=context.ladder.taken,
        )

    @classmethod
    def resumed(cls, model: LoadedModel, settings: Settings, held: Held) -> "Conversation":
        """One that goes on from what another held, which must not go on itself. Errors as of a new
        one."""
        talk = cls(model, settings)
        talk.context.resume(held)
        talk.documents = held.documents
        talk.ways.resume(held.paths, held.at)
        return talk

    @property
    def _path(self) -> Path:
        return self.ways.path

    def _answered(self, said: Said, text: str, turn: Turn, cancel: Event | None) -> Iterator[Piece]:
        """Stream the answer to a message that was read."""
        answer = {"role": "assistant", "content": ""}
        self._path.said.append(said)
        self._path.read.append(len(self.token_ids))
        self.messages.extend([{"role": "user", "content": text}, answer])
        for piece in self.context.answer(turn, ignore_eos=False, cancel=cancel):
            answer["content"] += piece.text
            yield piece

    @property
    def _unread(self) -> list[int]:
        """What of the last answer goes before a new message: the template closes it itself."""
        if self.model.tokenizer.chat_template is None or not self.messages:
            return self.context.pending
        return [token for token in self.context.pending if token not in self.model.stop_ids]

    def _said(self, text: str, *, after: Said | None = None) -> list[int]:
        """The tokens of a user message.

        Args:
            after: where it is said; None for now.
        """
        opening, first = not self.messages, len(self.token_ids) == len(self._path.ahead)
        if after is not None:
            opening, first = not after.messages, after.checkpoint.seen == len(after.ahead)
        tokenizer, system = self.model.tokenizer, self.settings.system
        return said_tokens(tokenizer, text, opening=opening, first=first, system=system)

    def _after_ahead(self, text: str) -> list[int]:
        """The tokens of a new user message that have not been read ahead.

        Raises:
            SettingError: it does not begin with what was.
        """
        ids, ahead = self._said(text), self._path.ahead
        if not ids:
            raise SettingError("there is nothing to answer: say something")
        if not goes_on(ids, ahead):
            raise SettingError("the message does not begin with what was read ahead")
        return ids[len(ahead) :]
