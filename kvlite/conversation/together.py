"""Several questions about what conversations have read, answered together where that is possible.

Answers are those that each question alone would get, to rounding (`engine.step`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlite.conversation.answer_batch import AnswerBatch, Heard, Question
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import KvliteError, Stopped
from kvlite.methods.engine_config import EngineConfig

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation


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
