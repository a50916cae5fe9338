"""Several questions about what conversations have read, answered in the same decode steps.

Each question is read, and answered, in a context of its own, which begins as its conversation is
now. So answers are those that each question alone would get, to rounding (`engine.step`).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvlite.cache import KVCache
from kvlite.cache.copying import copied
from kvlite.cache.recurrent import copies_of
from kvlite.cache.segment import bytes_held
from kvlite.conversation.context import Context
from kvlite.conversation.exclusive import at_work
from kvlite.conversation.metrics import Piece
from kvlite.conversation.sources import with_sources
from kvlite.conversation.steps_together import StepsTogether
from kvlite.conversation.turn import Turn
from kvlite.conversation.what_is_kept import TurnPlan
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.slices import Slices
from kvlite.errors import KvliteError, OutOfMemory, SettingError, Stopped
from kvlite.memory.device_budget import ram_limit, spare_bytes
from kvlite.memory.oom import alone
from kvlite.methods.engine_config import EngineConfig
from kvlite.offload.kv.copies import StoreCopies
from kvlite.ops.compile_ahead import begin_compiling
from kvlite.ops.device import MANY_ROWS
from kvlite.ops.loops import Loops

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation

Question = tuple[str, Mapping[str, Any]]
"""A message, and settings of its answer, as of `stream`."""

Heard = tuple[int, Piece | KvliteError]
"""A question, by its index, and a piece of its answer; or why there is none."""

# With so many answers going, the next conversation waits: each costs memory, and a row more saves
# less and less.
_ENOUGH = 8


def ask_each(
    talk: "Conversation", texts: Sequence[str], callbacks: Callbacks, settings: dict[str, Any]
) -> Iterator[Heard]:
    """Answer messages, each as if it alone were said now. The conversation stays as it is.

    As many answers as fit in memory come together; when one ends, the next begins.

    Args:
        texts: messages, which begin with what was read ahead.
        callbacks: follow each reading. `cancel` ends all answers that have begun.
        settings: as of `stream`; with a temperature, each answer draws with the same seed.

    Yields:
        Pieces in the order in which they come. What is wrong with one message, or ends one answer
        for lack of memory, does not end the others.

    Raises:
        SettingError: a setting is unknown or out of range.
    """
    config, questions = talk.config.after_load(settings), [(text, settings) for text in texts]
    with suppress(SettingError), at_work(talk):  # or each question is refused
        talk.history.give_up_reading()
    if len(questions) < 2:
        yield from _one_after_another(talk, questions, 0, callbacks)
    else:
        yield from ask_all([(talk, config, questions)], callbacks)


def ask_all(
    conversations: Iterable[tuple["Conversation", EngineConfig, Sequence[Question]]],
    callbacks: Callbacks,
) -> Iterator[Heard]:
    """As `ask_each`, of several conversations of one model, each asked its own questions.

    Args:
        conversations: the next one is taken when there is room for its answers. Its questions
            differ from its config in how answers are drawn and how long they are, in nothing else.

    Yields:
        Questions are counted through.
    """
    callbacks, count = _once(callbacks), 0
    batch = AnswerBatch(callbacks)
    for talk, config, questions in conversations:
        if why := _why_alone(talk, config):
            if len(questions) > 1:
                callbacks.say(f"questions are answered one after another, since {why}")
            yield from batch.answers()
            yield from _one_after_another(talk, questions, count, callbacks)
        else:
            try:
                yield from batch.add(talk, config, questions, count)
            except Stopped:
                break
            while batch.waiting or not batch.has_room_for_another():
                yield from batch.advance()
        count += len(questions)
    yield from batch.answers()


def _once(callbacks: Callbacks) -> Callbacks:
    """What holds for several questions is said once."""
    said = set[str]()

    def notify(note: str) -> None:
        if note not in said:
            said.add(note)
            callbacks.say(note)

    return replace(callbacks, notify=notify)


def _why_alone(talk: "Conversation", config: EngineConfig) -> str:
    settings, store = config.settings, talk.store
    if settings.vram != "auto":
        return f"--vram {settings.vram} limits the tensors of one answer"
    if settings.beyond_context == "compact":
        return "--beyond-context compact may forget a part of the document for one of them"
    if settings.recall == "disk" or (store is not None and store.on_disk):
        return "what was read is on disk, where each would need a copy of it"
    return ""


def _one_after_another(
    talk: "Conversation", questions: Sequence[Question], first: int, callbacks: Callbacks
) -> Iterator[Heard]:
    for index, (text, settings) in enumerate(questions, first):
        said = len(talk.messages)
        try:
            for piece in talk.stream(text, callbacks=callbacks, **settings):
                yield index, piece
        except Stopped:
            return
        except KvliteError as error:
            yield index, error.with_traceback(None)
        finally:
            if len(talk.messages) > said:
                talk.undo()
        if callbacks.cancelled:
            return


@dataclass(eq=False)
class _Source:
    """A conversation whose questions are answered.

    Attributes:
        config: of its answers, apart from how they are drawn and how long they are.
        copies: of its host store, if questions are read from there.
        plans: of the first question of each length that is planned for, which others share.
    """

    talk: "Conversation"
    config: EngineConfig
    copies: StoreCopies | None = None
    plans: dict[int, TurnPlan] = field(default_factory=dict)

    def share_store(self, longest: int) -> None:
        """Prepare the host store for questions and answers of at most so many tokens together."""
        talk, context, store = self.talk, self.talk.context, self.talk.store
        recalls = self.config.settings.recall != "off" and not self.config.ignores_recall
        if store is not None and store.begun and (recalls or context.emptied):
            room = len(talk.token_ids) - store.seen + longest
            self.copies = context.oom_policy.run(partial(StoreCopies, store, room), {})

    @property
    def copy_bytes(self) -> int:
        """What the host store of one more answer takes."""
        return 0 if self.copies is None else self.copies.own_bytes

    @property
    def store_bytes(self) -> int:
        """What the conversation's own host store takes."""
        store = self.talk.store
        return 0 if store is None else store.nbytes

    @torch.inference_mode()
    def branched(self) -> Context:
        """A context that goes on from where the conversation is."""
        model, context = self.talk.model, self.talk.context
        states = copies_of(context.cache.states, model.device_of)
        if self.copies is None:
            layers, store = copied(context.cache.layers, model.devices), None
        else:  # the next turn reads from the store
            layers, store = model.empty_cache().layers, self.copies.copy()
        before = context.cache
        cache = KVCache(layers, before.seen, before.reconstructed, states=states)
        own, given_up = Context(model), [*context.oom_policy.taken]
        own.resume(cache, store, [*context.token_ids], [], context.notes, given_up)
        own.told, own.ahead = {*context.told}, context.ahead
        return own


@dataclass(eq=False)
class _Question:
    """A question, which waits; once it was read, `pieces` are its answer, by `turn`."""

    index: int
    source: _Source
    text: str
    ids: list[int]
    config: EngineConfig
    turn: Turn = field(init=False)
    pieces: Iterator[Piece] = field(init=False)


class AnswerBatch:
    """Answers that come together; they begin and end at any token.

    Attributes:
        waiting: questions that nobody has read yet.
        going: those whose answers have begun and not ended.
        largest: bytes of the device that one of them takes, at most so far.
        reading: bytes that reading takes besides, by the plan.
    """

    def __init__(self, callbacks: Callbacks) -> None:
        self.callbacks = callbacks
        self._steps = StepsTogether()
        self.waiting: deque[_Question] = deque()
        self.going: list[_Question] = []
        self.largest = self.reading = 0

    def add(
        self,
        talk: "Conversation",
        config: EngineConfig,
        questions: Sequence[Question],
        first: int,
    ) -> Iterator[Heard]:
        """Let questions wait, counted from `first`; yields what is wrong with those that do not.
        Raises Stopped."""
        begin_compiling(talk.model.device, *Loops)
        source, longest = _Source(talk, config), 0
        waiting: list[_Question] = []
        for index, (text, settings) in enumerate(questions, first):
            try:
                own = talk.config.after_load(settings)
                ids = talk.message_ids(text, own.settings, self.callbacks.cancel)
            except Stopped:
                raise
            except KvliteError as error:
                yield index, error.with_traceback(None)
                continue
            waiting.append(_Question(index, source, text, ids, own))
            answer = own.settings.max_new_tokens or own.settings.planned_tokens
            longest = max(longest, len(ids) + answer)
        try:
            with at_work(talk):
                talk.context.end_step(config)
                source.share_store(longest)
        except KvliteError as error:
            yield from ((each.index, error.with_traceback(None)) for each in waiting)
        else:
            self.waiting.extend(waiting)

    def answers(self) -> Iterator[Heard]:
        """Answer all that waits and goes on."""
        try:
            while self.waiting or self.going:
                yield from self.advance()
        finally:
            self._steps.release()

    def advance(self) -> Iterator[Heard]:
        """Begin what fits, with a token of each answer after every slice of reading; then one token
        of each answer."""
        short = False
        while self.waiting and not short and self._has_room():
            question = self.waiting.popleft()
            for heard in self._begin(question):
                if heard is None:
                    yield from self._step()
                else:
                    yield heard
            short = question in self.waiting
        if self.callbacks.cancelled:
            self.waiting.clear()
        yield from self._step()

    def _step(self) -> Iterator[Heard]:
        self._steps.take([each.turn for each in self.going])
        for each in [*self.going]:
            yield self._next_piece(each)

    def _next_piece(self, question: _Question) -> Heard:
        piece = next(question.pieces)
        if piece.finish_reason is not None:
            self.going.remove(question)
        return question.index, piece

    def _begin(self, question: _Question) -> Iterator[Heard | None]:
        """Read a question, and yield None between slices; then the first piece of its answer, or
        what went wrong. Where memory is short, it waits until one of the others ends."""
        try:
            yield from self._read(question)
        except Stopped:
            self.waiting.clear()
        except KvliteError as error:
            if isinstance(error, OutOfMemory) and self.going:
                self.waiting.appendleft(question)
            else:
                yield question.index, error.with_traceback(None)
        else:
            self.going.append(question)
            yield self._next_piece(question)

    def _read(self, question: _Question) -> Slices[None]:
        source, cancel, config = question.source, self.callbacks.cancel, question.config
        talk, length = source.talk, config.settings.planned_tokens
        with at_work(talk):
            own = talk.context.oom_policy.run(source.branched, {})
        own.watches = bool(talk.documents)
        turn = own.next_turn(question.ids, config, plan=source.plans.get(length))
        talk.watch(turn, question.text)
        own.oom_policy.waits = lambda: bool(self.going)
        yield from own.read_in_slices(turn, self.callbacks)
        own.oom_policy.waits = alone
        taken = own.cache.nbytes + (0 if turn.store is None else turn.store.index_bytes)
        self.largest = max(self.largest, taken)
        if length not in source.plans:
            source.plans[length], plan = turn.plan, turn.run_stats.planned_phases
            beside = bytes_held(talk.model.tensors()) + taken
            self.reading = max(self.reading, plan.get("read", 0) - beside)
        said = [*talk.history.said, (question.text, len(own.token_ids))]
        about = own, said, talk.documents, config.settings
        answer = own.answer(turn, cancel)
        question.turn, question.pieces = turn, (with_sources(piece, *about) for piece in answer)

    def _has_room(self) -> bool:
        if not self.going:
            return True  # one by itself always begins
        few = len(self.going) + 1 < MANY_ROWS  # so that what is rounded does not depend on others
        return few and self._fits(self.waiting[0].source.copy_bytes, self.largest + self.reading)

    def has_room_for_another(self) -> bool:
        """Whether a conversation as large as those so far may be read beside them."""
        if not self.going:
            return True
        store = max(each.source.store_bytes for each in self.going)
        fits = self._fits(store, 2 * self.largest + self.reading)
        return len(self.going) < _ENOUGH and fits

    def _fits(self, host_bytes: int, nbytes: int) -> bool:
        """Whether host stores may take more, and the device has so much."""
        first = self.going[0].source
        sources = {each.source for each in self.going}
        taken = sum(each.source.copy_bytes for each in self.going)
        taken += sum(each.store_bytes for each in sources)
        limit = ram_limit(first.config.recall_limit, taken)
        model = first.talk.model
        nbytes += host_bytes if model.device.type == "cpu" else 0  # which has one memory
        return taken + host_bytes <= limit and nbytes <= spare_bytes(model.all_devices)
