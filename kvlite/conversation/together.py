"""Several questions about what a conversation has read, answered in the same decode steps.

Each question is read, and answered, in a context of its own, which begins as the conversation is
now. So answers are those that each question alone would get, to rounding (`engine.batch`).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvlite.cache import KVCache
from kvlite.cache.copying import copied
from kvlite.cache.recurrent import copies_of
from kvlite.cache.segment import bytes_held
from kvlite.conversation.context import Context
from kvlite.conversation.exclusive import alone_by_steps
from kvlite.conversation.metrics import Piece
from kvlite.conversation.turn import Turn
from kvlite.engine.batch import run_together
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import KvliteError, OutOfMemory, Stopped
from kvlite.memory.device_budget import ERROR, ram_limit
from kvlite.memory.free import free_bytes
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.load import LoadedModel
from kvlite.offload.kv.copies import StoreCopies

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation

Heard = tuple[int, Piece | KvliteError]
"""A question, by its index, and a piece of its answer; or why there is none."""


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
    config, callbacks = talk.config.after_load(settings), _once(callbacks)
    why = _why_alone(talk, config) if len(texts) > 1 else ""
    if why:
        callbacks.say(f"questions are answered one after another, since {why}")
    if why or len(texts) == 1:
        yield from _one_after_another(talk, texts, callbacks, settings)
        return
    yield from _together(talk, texts, callbacks, config)


@alone_by_steps
def _together(
    talk: "Conversation", texts: Sequence[str], callbacks: Callbacks, config: EngineConfig
) -> Iterator[Heard]:
    talk.context.end_step(config)
    try:
        batch = _AnswerBatch(talk, texts, callbacks, config)
    except Stopped:
        return
    yield from batch.answers()


def _once(callbacks: Callbacks) -> Callbacks:
    """The same callbacks, told once what holds for several questions."""
    notify, told = callbacks.notify, set[str]()

    def tell(note: str) -> None:
        if notify is not None and note not in told:
            told.add(note)
            notify(note)

    return replace(callbacks, notify=tell)


def _why_alone(talk: "Conversation", config: EngineConfig) -> str:
    """Why answers cannot come together; "" if they can."""
    settings, store = config.settings, talk.store
    if talk.model.device.type != "cpu":
        return f"nobody has tried it together on {talk.model.device.type} yet"
    if settings.vram != "auto":
        return f"--vram {settings.vram} limits the tensors of one answer"
    if settings.beyond_context == "compact":
        return "--beyond-context compact may forget a part of the document for one of them"
    if settings.recall == "disk" or (store is not None and store.on_disk):
        return "what was read is on disk, where each would need a copy of it"
    return ""


def _one_after_another(
    talk: "Conversation", texts: Sequence[str], callbacks: Callbacks, settings: dict[str, Any]
) -> Iterator[Heard]:
    for index, text in enumerate(texts):
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
        if callbacks.cancel is not None and callbacks.cancel.is_set():
            return


@dataclass(eq=False)
class _Answer:
    """An answer that has begun."""

    index: int
    turn: Turn
    pieces: Iterator[Piece]


class _AnswerBatch:
    """Answers that come together.

    Attributes:
        waiting: messages that nobody has read yet, by index, with their tokens.
        refused: what is wrong with the others.
        going: answers that have begun and not ended.
        copies: of the host store, if questions are read from there.
        largest: bytes of the device that one of them takes, at most so far.
        reading: bytes that reading takes besides, by the plan.
        plan: of the first question, which the others share.
    """

    def __init__(
        self, talk: "Conversation", texts: Sequence[str], callbacks: Callbacks, config: EngineConfig
    ) -> None:
        self.talk, self.callbacks, self.config = talk, callbacks, config
        self.waiting: deque[tuple[int, str, list[int]]] = deque()
        self.refused: list[Heard] = []
        for index, text in enumerate(texts):
            try:
                self.waiting.append((index, text, talk.message_ids(text, callbacks.cancel)))
            except Stopped:
                raise
            except KvliteError as error:
                self.refused.append((index, error.with_traceback(None)))
        self.going: list[_Answer] = []
        self.plan: dict[str, int] | None = None
        self.copies: StoreCopies | None = None
        self.largest = self.reading = 0
        context, store, settings = talk.context, talk.store, config.settings
        recalls = settings.recall != "off" and not config.ignores_recall
        if store is not None and store.begun and (recalls or context.emptied):
            longest = max((len(ids) for _, _, ids in self.waiting), default=0)
            again = len(talk.token_ids) - store.seen
            room = longest + again + settings.max_new_tokens
            self.copies = context.oom_policy.run(partial(StoreCopies, store, room), {})

    def answers(self) -> Iterator[Heard]:
        """As `ask_each`."""
        yield from self.refused
        while self.waiting or self.going:
            while self.waiting and self._has_room():
                index, text, ids = self.waiting.popleft()
                try:
                    begun = self._begin(index, text, ids)
                except Stopped:
                    self.waiting.clear()
                except OutOfMemory as error:
                    if self.going:  # it waits until one of them ends
                        self.waiting.appendleft((index, text, ids))
                        break
                    yield index, error.with_traceback(None)
                except KvliteError as error:
                    yield index, error.with_traceback(None)
                else:
                    yield self._next_piece(begun)
            if self.callbacks.cancel is not None and self.callbacks.cancel.is_set():
                self.waiting.clear()
            if len(self.going) > 1:
                step_together(self.talk.model, [each.turn for each in self.going])
            for each in [*self.going]:
                yield self._next_piece(each)

    def _next_piece(self, answer: _Answer) -> Heard:
        piece = next(answer.pieces)
        if piece.metrics.finish_reason is not None:
            self.going.remove(answer)
        return answer.index, piece

    def _begin(self, index: int, text: str, ids: list[int]) -> _Answer:
        """Read a question in a context of its own."""
        talk, cancel = self.talk, self.callbacks.cancel
        own = self._context()
        turn = own.next_turn(ids, self.config, plan=self.plan)
        turn.note(talk.not_read(text))
        own.read(turn, self.callbacks)
        taken = own.cache.nbytes + (0 if turn.store is None else turn.store.index_bytes)
        self.plan = turn.run_stats.planned_phases
        planned = self.plan.get("read", 0)
        self.largest = max(self.largest, taken)
        self.reading = max(self.reading, planned - bytes_held(talk.model.tensors()) - taken)
        begun = _Answer(index, turn, own.answer(turn, ignore_eos=False, cancel=cancel))
        self.going.append(begun)
        return begun

    @torch.inference_mode()
    def _context(self) -> Context:
        """A context that goes on from where the conversation is."""
        model, context = self.talk.model, self.talk.context
        states = copies_of(context.cache.states, model.device)
        if self.copies is None:
            layers, store = copied(context.cache.layers, model.device), None
        else:  # the next turn reads from the store
            layers, store = model.empty_cache().layers, self.copies.copy()
        before = context.cache
        cache = KVCache(layers, before.seen, before.reconstructed, states=states)
        own, given_up = Context(model), [*context.oom_policy.taken]
        own.resume(cache, store, [*context.token_ids], [], context.notes, given_up)
        own.told = {*context.told}
        return own

    def _has_room(self) -> bool:
        """Whether one more answer fits; one by itself always begins."""
        if not self.going:
            return True
        copies = 0 if self.copies is None else self.copies.own_bytes
        free = (1 - ERROR) * free_bytes(self.talk.model.device)
        limit = ram_limit(self.config.settings.recall_limit, len(self.going) * copies)
        fits = (len(self.going) + 1) * copies <= limit
        return fits and self.largest + self.reading + copies <= free


def step_together(model: LoadedModel, turns: Sequence[Turn]) -> None:
    """One decode step for turns with a pending token. Where memory runs out, a turn tries again by
    itself when its next piece is asked for."""
    with ExitStack() as stack:
        for turn in turns:
            stack.enter_context(turn.run_stats.work(model))
        begun = []
        for turn in turns:
            turn.together = max(turn.together, len(turns))
            try:
                begun.append((turn, turn.next_step()))
            except OutOfMemory:
                continue
        made = run_together(model, [step for _, step in begun])
    for (turn, step), logits in zip(begun, made, strict=True):
        if turn.speculation is not None:
            turn.speculation.stepped()
        if isinstance(logits, OutOfMemory):
            turn.step = step
        else:
            turn.entered(logits)
