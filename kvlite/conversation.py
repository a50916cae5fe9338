"""A conversation: what was read and answered, on one cache that stays compressed."""

from collections.abc import Callable, Generator, Iterator, Sequence
from threading import Event
from typing import Any
from weakref import ref

from kvlite.cache import parse_kv_bits
from kvlite.documents import whole_characters
from kvlite.engine.prefill import Progress, empty_cache
from kvlite.errors import SettingError
from kvlite.ledger import Answer, Piece
from kvlite.memory.ladder import Ladder
from kvlite.methods.amount import method_and_amount
from kvlite.model.load import LoadedModel
from kvlite.offload import Tier
from kvlite.offload.room import ram_limit
from kvlite.prompts import certain, user_turn
from kvlite.settings import Settings
from kvlite.turn import Notify, Turn


class Conversation:
    """Turns of one conversation. Not safe for use from several threads at once.

    Attributes:
        cache: keys and values held.
        tier: everything that was read, if turns recall.
        token_ids: every token in the cache, in order; an answer's last one follows with the
            next turn.
        messages: the turns that went through the chat template; the last answer as far as it
            was heard.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        """Start empty.

        Raises:
            SettingError: the method, the budget or the bits are none, they do not fit each other,
                or the method needs a calibration of the model.
        """
        parse_kv_bits(settings.kv_bits)
        ram_limit(settings.recall_limit, 0)
        method, _ = method_and_amount(settings.method, settings.budget)
        method.fitted(model.shape, model.calibration)
        self.model = model
        self.settings = settings
        self.token_ids: list[int] = []
        self.messages: list[dict[str, str]] = []
        self._ahead: list[int] = []
        self._noted: tuple[str, ...] = ()
        self._turn: Turn | None = None
        self._answer: Generator[Piece] | None = None
        self.cache = empty_cache(model)
        self.tier: Tier | None = None
        self.ladder = Ladder(model.device)

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
            ids = self._encoded(content, special=not self.token_ids)
        else:
            ids = _whole_numbers(content)
        if ids:
            self._end_step(self.settings)
            ids = [*self._pending, *ids]
            self._read(ids, self.settings, progress, notify, cancel, answers=False)
            self._ahead = []

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
        if self._ahead:
            raise SettingError("something was read ahead already: say what goes on from it")
        self._end_step(self.settings)
        ahead = certain(self._said, text)
        turn = (
            self._turn_of([*self._unread, *ahead], self.settings, answers=False) if ahead else None
        )
        if turn is None or (turn.loses and (turn.tier is None or not turn.method.exact)):
            return False
        self._take(turn, progress, notify, cancel)
        self._ahead = ahead
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
        ids = _whole_numbers(token_ids)
        if not ids:
            raise SettingError("there is nothing to answer: give at least one token")
        self._end_step(chosen)
        turn = self._read([*self._pending, *ids], chosen, progress, notify, cancel)
        self._ahead = []
        self._answer = turn.answer(ignore_eos=ignore_eos, cancel=cancel)
        yield from self._answer

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
        self._end_step(chosen)
        ids = [*self._unread, *self._after_ahead(text)]
        turn = self._read(ids, chosen, progress, notify, cancel)
        self._ahead = []
        answer = {"role": "assistant", "content": ""}
        self.messages += [{"role": "user", "content": text}, answer]
        self._answer = turn.answer(ignore_eos=False, cancel=cancel)
        for piece in self._answer:
            answer["content"] += piece.text
            yield piece

    def _end_step(self, settings: Settings) -> None:
        """Go on with a token for which there was no memory in the middle of an answer, unless the
        next turn reads it from the tier anyway.

        Raises:
            OutOfMemory: there is still not enough.
        """
        turn = self._turn
        if turn is not None and (turn.tier is None or self._tier_for(settings) is None):
            turn.finish_step()

    @property
    def _pending(self) -> list[int]:
        """What was answered last and has not been read."""
        return [] if self._turn is None else self._turn.pending

    def _read(
        self,
        ids: list[int],
        settings: Settings,
        progress: Progress | None,
        notify: Notify | None,
        cancel: Event | None,
        *,
        answers: bool = True,
    ) -> Turn:
        turn = self._turn_of(ids, settings, answers=answers)
        self._take(turn, progress, notify, cancel)
        return turn

    def _turn_of(self, ids: list[int], settings: Settings, *, answers: bool) -> Turn:
        tier = self._tier_for(settings)
        return Turn(
            self.model,
            self.cache,
            self.token_ids,
            ids,
            settings,
            ladder=self.ladder,
            tier=tier,
            answers=answers,
        )

    def _take(
        self,
        turn: Turn,
        progress: Progress | None,
        notify: Notify | None,
        cancel: Event | None,
    ) -> None:
        """Read a turn; what it noted is noted with the next answer too, if it has none itself."""
        if self._answer is not None:
            self._answer.close()  # nobody listened to its end
        self.ladder.never_lossy, self.ladder.tell = turn.settings.never_lossy, _telling(turn)
        turn.read(progress, notify, cancel)
        self._turn = turn
        turn.notes = tuple(dict.fromkeys([*self._noted, *turn.notes]))
        self._noted = () if turn.answers else turn.notes
        if turn.tier is not None or not self._set_aside(turn.settings):
            self.tier = turn.tier

    def _set_aside(self, settings: Settings) -> bool:
        """Whether a turn does not look at the tier, which later ones may: they read again what they
        missed."""
        method, _ = method_and_amount(settings.method, settings.budget)
        return method.mask(1) is not None and settings.recall == "auto"

    def _tier_for(self, settings: Settings) -> Tier | None:
        """What a turn recalls from, if its settings ask for that."""
        method, _ = method_and_amount(settings.method, settings.budget)
        ram_limit(settings.recall_limit, 0)
        if settings.recall == "off" or self._set_aside(settings):
            return None
        if method.mask(1) is not None:
            raise SettingError(
                f"{method.spec} never looks at what is out of its sight, so --recall "
                f"{settings.recall} has nothing to bring back: use --recall off"
            )
        bits = parse_kv_bits(settings.recall_bits)
        if self.tier is not None:
            self.tier.bits = bits
            return self.tier
        if not method.frees_memory:
            return None
        full = [self.cache.layers[index] for index in self.model.shape.full_layers]
        if any(
            layer.entries_mean < self.cache.seen or layer.computed or layer.packed for layer in full
        ):
            return None  # some of it is gone
        return Tier.empty(self.model.shape, self.model.dtype, bits)

    @property
    def planned_peak_bytes(self) -> int:
        """What live tensors were expected to come to in the last turn; 0 if that is not known."""
        return 0 if self._turn is None else self._turn.planned or 0

    @property
    def _unread(self) -> list[int]:
        """What of the last answer goes before a new message: the template closes it itself."""
        if self.model.tokenizer.chat_template is None or not self.messages:
            return self._pending
        return [token for token in self._pending if token not in self.model.stop_ids]

    def _said(self, text: str) -> list[int]:
        """The tokens of a new user message."""
        tokenizer = self.model.tokenizer
        if tokenizer.chat_template is None:
            return self._encoded(text, special=len(self.token_ids) == len(self._ahead))
        return user_turn(tokenizer, whole_characters(text), opening=not self.messages)

    def _after_ahead(self, text: str) -> list[int]:
        """The tokens of a new user message that have not been read ahead.

        Raises:
            SettingError: it does not begin with what was.
        """
        ids, ahead = self._said(text), self._ahead
        if ids[: len(ahead)] != ahead or len(ids) == len(ahead):
            raise SettingError("the message does not begin with what was read ahead")
        return ids[len(ahead) :]

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        text = whole_characters(text)
        ids: list[int] = self.model.tokenizer.encode(text, add_special_tokens=special)
        return ids


def _telling(turn: Turn) -> Callable[[str], None]:
    """Tells a turn what is given up, without keeping it: it holds the ladder that does."""
    held = ref(turn)

    def tell(said: str) -> None:
        current = held()
        if current is not None:
            current.gave_up(said)

    return tell


def _whole_numbers(token_ids: Any) -> list[int]:
    """Token ids as a list.

    Raises:
        SettingError: they are something else.
    """
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if isinstance(ids, list | tuple) and all(isinstance(token, int) for token in ids):
        return list(ids)
    raise SettingError(
        f"{type(token_ids).__name__} is not a list of token ids: encode text with "
        "runner.tokenizer.encode, or say it with stream"
    )
