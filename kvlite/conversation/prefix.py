"""Answering a whole prompt of which a conversation has read the beginning already.

Programs send everything said each time. What their tokens have in common with those that were read
stays, whoever wrote them; the rest is read. Only token ids count, not messages.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from kvlite.config.settings import Settings
from kvlite.conversation.branch import Branch
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.run_stats import RunStats
from kvlite.conversation.turn_config import TurnConfig
from kvlite.conversation.ways_back import checkpoint_at, densest
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import can_recall
from kvlite.model.load import LoadedModel

# The last tokens of a prompt choose what the cache keeps: so many are read together with it, even
# if some were read before.
CHOOSING = 64
# Checkpoints that are kept: prompts come without end.
MOST_CHECKPOINTS = 16
# Tokens of a prompt after which what was read can be saved.
PART = 4096


def known_ids(talk: Conversation) -> list[int]:
    """All tokens that were read and generated."""
    return [*talk.token_ids, *talk.context.pending_ids]


def hold_in_tokens(talk: Conversation) -> None:
    """Forget the messages and documents of a conversation that is gone on with in tokens alone:
    they would not be those of its tokens any more."""
    checkpoints, former = talk.context.checkpoints, talk.history.branch
    talk.history.resume([Branch(boundaries=[*former.prefill_boundaries])], 0)
    talk.context.checkpoints, talk.documents = checkpoints, ()


def common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = zip(one, two, strict=False)
    shorter = min(len(one), len(two))
    return next((at for at, (own, other) in enumerate(pairs) if own != other), shorter)


def require_answerable(model: LoadedModel, ids: Sequence[int], settings: Settings) -> None:
    """Raises SettingError or ContextError where no conversation could answer a prompt. That needs
    no thread of its own, and is known before others have been answered."""
    talk = Conversation(model, settings)
    TurnConfig.of(talk.context, [*ids], talk.config, answers=True)


def answer_prompt(
    talk: Conversation,
    ids: Sequence[int],
    *,
    ignore_eos: bool = False,
    callbacks: Callbacks = NO_CALLBACKS,
    partings: Sequence[int] = (),
    part_read: Callable[[], None] | None = None,
    **settings: Any,
) -> Generator[Piece | None, float | None]:
    """Answer a whole prompt (at least one token) in a conversation that is held in tokens alone.

    Other args and errors are those of `Conversation.stream_tokens`. After an error the conversation
    has read the beginning of the prompt, or what it had read before.

    Args:
        partings: tokens after which other prompts may go on otherwise: if it can only go back to
            checkpoints, one is made there.
        part_read: called when a part of the prompt was read, and the conversation may be saved.

    Yields:
        None between two slices of the reading, then pieces.
    """
    chosen = talk.config.after_load(settings)
    stops = _stops(talk.model, chosen, partings, len(ids))
    new, answers = _part(talk, ids, stops)
    if not talk.history.goes_on(new, chosen, answers=answers):
        talk.context.end_step(chosen)
        _seek_to(talk, ids, chosen, callbacks)
    first, layers = len(talk.token_ids), talk.model.shape.layers
    earlier: tuple[RunStats, int] | None = None
    while True:
        (new, answers), start = _part(talk, ids, stops), None
        if not talk.history.goes_on(new, chosen, answers=answers):
            start = talk.context.checkpoint(chosen)
        try:
            turn = talk.history.next_turn(new, chosen, answers=answers)
        except BaseException:
            talk.context.release(start)
            raise
        if earlier is not None and start is not None:
            turn.run_stats.go_on_from(*earlier)
        before, after = len(talk.token_ids) - first, len(ids) - len(talk.token_ids) - len(new)
        told = _over_all(callbacks, before * layers, after * layers)
        yield from talk.history.read_in_slices(turn, told, start)
        if part_read is not None:
            part_read()
        if answers:
            break
        earlier, talk.context.ahead = (turn.run_stats, len(new)), (0, 0.0)
    if checkpoint_at(talk.context, len(talk.token_ids)) is None:
        talk.context.checkpoint(chosen)
    while len(talk.context.checkpoints) > MOST_CHECKPOINTS:
        talk.context.release(densest(talk.context.checkpoints))
    yield from talk.context.answer(turn, callbacks.cancel, in_words=False, ignore_eos=ignore_eos)


def cuts_anywhere(model: LoadedModel) -> bool:
    """Whether all layers keep what they read, so that a whole cache can be cut back to any number
    of tokens."""
    return not model.shape.recurrent_layers and not any(model.shape.window_sizes)


def _stops(
    model: LoadedModel, config: EngineConfig, partings: Sequence[int], count: int
) -> list[int]:
    """Where the reading of so many tokens pauses, which changes nothing that is kept."""
    recalls = config.settings.recall != "off" and can_recall(config.method)
    rounds = recalls and config.recall_bits is not None
    if not (recalls or config.budget.auto) or config.settings.beyond_context == "compact":
        return []
    needs_checkpoints = rounds or not cuts_anywhere(model)
    return [*range(PART, count, PART), *(partings if needs_checkpoints else ())]


def _over_all(callbacks: Callbacks, before: int, after: int) -> Callbacks:
    """The same callbacks, with the progress of a part counted in layer-tokens of all parts."""
    told = callbacks.progress
    if told is None:
        return callbacks
    return replace(callbacks, progress=lambda done, of: told(before + done, before + of + after))


def _part(talk: Conversation, ids: Sequence[int], stops: Sequence[int]) -> tuple[list[int], bool]:
    """What to read next, and whether it is the last. Some tokens lie between stops, and behind."""
    read, ends = len(talk.token_ids), (min(each, len(ids) - CHOOSING) for each in stops)
    stop = min((each for each in ends if each - read >= CHOOSING), default=len(ids))
    return [*ids[read:stop]], stop == len(ids)


def _seek_to(
    talk: Conversation, ids: Sequence[int], config: EngineConfig, callbacks: Callbacks
) -> None:
    """Be as after a beginning of `ids`, the longest that can be had without reading."""
    context, known = talk.context, known_ids(talk)
    same = min(common(known, ids), len(ids) - 1)
    goes_on, wanted = same == len(known), same
    store, read = context.store, len(context.token_ids)
    if store is not None and store.begun:  # which reads the last answer again anyway
        chooses, read = True, store.seen
    else:
        chooses = same < read and any(each.packed for each in context.cache.layers)
    if chooses and len(ids) - min(same, read) < CHOOSING:
        wanted = min(same, max(0, len(ids) - CHOOSING))
    if wanted >= len(context.token_ids):
        return
    end = checkpoint_at(context, wanted)
    if end is None and goes_on:
        return
    context.release(*(each for each in context.checkpoints if each.seen > same))
    end = end or max(context.checkpoints, key=lambda each: each.seen, default=Checkpoint())
    context.seek(ids[: end.seen], end, (), (), config, callbacks)
