"""A conversation in tokens: read and answered in turns, on one context that stays compressed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path as FilePath
from threading import Event, Lock
from typing import Any, Self

from kvlite.cache import KVCache
from kvlite.config.arguments import path_of, require_callable, token_list
from kvlite.config.settings import Settings
from kvlite.conversation import snapshot
from kvlite.conversation.context import Context
from kvlite.conversation.exclusive import alone, alone_by_steps
from kvlite.conversation.history import History
from kvlite.conversation.metrics import Answer, Piece
from kvlite.conversation.session_state import SessionState
from kvlite.conversation.tensor_file import Progress as Saving
from kvlite.documents import Document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.errors import SettingError
from kvlite.memory.oom import OOMPolicy
from kvlite.methods.engine_config import EngineConfig, require_meanings
from kvlite.model.chat_template import text_tokens
from kvlite.model.load import LoadedModel
from kvlite.model.text_limit import tokenized
from kvlite.offload import HostKVStore


class TokenConversation:
    """Turns on one context, as tokens, and the file they can be saved in. One thread at a time can
    do anything with it: others are refused meanwhile.

    Attributes:
        busy: held while something is done.
        config: settings of the turns to come, parsed.
        context: what was read, as tokens.
        documents: what it is about, for whoever saves it, and quotes from it once it is opened.
        history: what was said, on every branch.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        """Start empty.

        Raises:
            SettingError: the method, the budget or the bits are none, they do not fit each other,
                or the method needs a calibration of the model.
        """
        self.config = require_meanings(settings)
        self.config.method.fitted(model.shape, model.calibration)
        self.busy = Lock()
        self.model = model
        self.context = Context(model)
        self.documents: tuple[Document, ...] = ()
        self.history = History(self.context)

    @property
    def settings(self) -> Settings:
        """Of the turns to come; setting them raises SettingError if they mean nothing."""
        return self.config.settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self.config = EngineConfig.from_settings(settings)

    @property
    def cache(self) -> KVCache:
        """Keys and values held."""
        return self.context.cache

    @property
    def store(self) -> HostKVStore | None:
        """Everything that was read, if turns recall."""
        return self.context.store

    @property
    def oom_policy(self) -> OOMPolicy:
        """What was given up when memory ran out."""
        return self.context.oom_policy

    @property
    def token_ids(self) -> list[int]:
        """Every token in the cache, in order; an answer's last one follows with the next turn."""
        return self.context.token_ids

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of host memory that it takes to go back without reading again."""
        return self.context.checkpoint_bytes

    @property
    def planned_peak_bytes(self) -> int:
        """What live tensors were expected to come to in the last turn; 0 if that is not known."""
        turn = self.context.turn
        return 0 if turn is None else turn.run_stats.planned or 0

    @alone
    def read(
        self,
        content: str | Sequence[int],
        *,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        """Read text or token ids without answering.

        Args:
            content: no chat template is applied, and what is spelled like a control token in a
                text is read as its characters: give token ids to have one. What does not fit the
                budget is dropped now, chosen without a question: to ask about a text, say both in
                one message to `stream`.
            callbacks: follow the reading, and can end it; notified of what the metrics will note, a
                sentence each, before anything is read.

        Raises:
            ContextError: it does not fit the model's trained context.
            SettingError: a token is not in the model's vocabulary.
            Stopped: `callbacks.cancel` was set; nothing of it was read.
        """
        if isinstance(content, str):
            ids = self._tokenized(
                partial(text_tokens, self.model.tokenizer, content, first=not self.token_ids),
                content,
                callbacks.cancel,
            )
        else:
            ids = token_list(content)
        if ids:
            self.context.end_step(self.config)
            ids = [*self.context.pending_ids, *ids]
            turn = self.history.next_turn(ids, self.config, answers=False)
            self.history.read(turn, callbacks)

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
            callbacks: as in `read`; `cancel` also ends the answer.
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
                callbacks=callbacks,
                **settings,
            )
        )
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
        """`generate`, piece by piece. A new turn ends one that is still being answered."""
        chosen = self.config.after_load(settings)
        ids = token_list(token_ids)
        if not ids:
            raise SettingError("there is nothing to answer: give at least one token")
        self.context.end_step(chosen)
        turn = self.history.next_turn([*self.context.pending_ids, *ids], chosen)
        self.history.read(turn, callbacks)
        yield from self.context.answer(turn, ignore_eos=ignore_eos, cancel=callbacks.cancel)

    @alone
    def save(
        self,
        path: str | FilePath,
        *,
        light: bool = False,
        progress: Saving | None = None,
        most: int | None = None,
    ) -> int:
        """Write it to a file, from which `Runner.open` goes on with it; its bytes. An answer that
        is still going on is saved as far as it was heard. Args and errors are those of
        `snapshot.save` and `state`."""
        target, state = path_of(path), self.state(light=light)
        require_callable(progress, "progress")
        return snapshot.save(target, state, self.model, self.settings, progress, most, light=light)

    def state(self, *, light: bool = False) -> SessionState:
        """All that the next turn goes on from, as it stands: not copied.

        Args:
            light: the cache will not be looked at, unless it was compacted.

        Raises:
            InterruptedCacheError: a step was interrupted, and nothing can go on from that.
        """
        context = self.context
        if not light or self.history.branch.compacted:
            context.end_step(self.config)
            if context.store is None:
                context.cache.require_whole()
        return SessionState(
            cache=context.cache,
            store=context.store,
            token_ids=context.token_ids,
            branches=self.history.branches,
            current=self.history.current,
            documents=self.documents,
            pending_ids=context.pending_ids,
            notes=context.notes,
            fallbacks=context.oom_policy.taken,
        )

    def _tokenized(
        self, encode: Callable[[], list[int]], text: str, cancel: Event | None
    ) -> list[int]:
        """The tokens that `encode` makes of a text, unless it cannot fit the model."""
        model = self.model
        return tokenized(encode, model.tokenizer, text, model.shape.max_context, cancel)

    @classmethod
    def resumed(cls, model: LoadedModel, settings: Settings, state: SessionState) -> Self:
        """One that goes on from what another held, which must not go on itself. Errors as of a new
        one."""
        talk = cls(model, settings)
        talk.context.resume(
            state.cache,
            state.store,
            state.token_ids,
            state.pending_ids,
            state.notes,
            state.fallbacks,
        )
        talk.documents = state.documents
        talk.history.resume(state.branches, state.current)
        return talk
