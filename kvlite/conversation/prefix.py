"""Answering a whole prompt of which a conversation has read the beginning already.

Programs send everything said each time. What their tokens have in common with those that were read
stays, whoever wrote them; the rest is read. Only token ids count, not messages.
"""

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

from kvlite.cache.cut import edge
from kvlite.cache.layer import Mark
from kvlite.config.settings import Settings
from kvlite.conversation.branch import Branch
from kvlite.conversation.checkpoint import Checkpoint, LayerState
from kvlite.conversation.context import Context
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.turn_config import TurnConfig
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import can_recall
from kvlite.model.load import LoadedModel
from kvlite.offload.kv.checkpoint import HostKVCheckpoint

# The last tokens of a prompt choose what the cache keeps: so many are read together with it, even
# if some were read before.
CHOOSING = 64
# Checkpoints that are kept: prompts come without end.
MOST_CHECKPOINTS = 16


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
    **settings: Any,
) -> Generator[Piece | None, float | None]:
    """Answer a whole prompt (at least one token) in a conversation that is held in tokens alone.

    Other args and errors are those of `Conversation.stream_tokens`. After an error the conversation
    has read the beginning of the prompt, or what it had read before.

    Args:
        partings: tokens after which other prompts may go on otherwise: if it can only go back to
            checkpoints, one is made there.

    Yields:
        None between two slices of the reading, then pieces.
    """
    chosen = talk.config.after_load(settings)
    stops = [*partings] if _pauses(talk.model, chosen) else []
    new, answers = _part(talk, ids, stops)
    if not talk.history.goes_on(new, chosen, answers=answers):
        talk.context.end_step(chosen)
        _seek_to(talk, ids, chosen, callbacks)
    while True:
        (new, answers), start = _part(talk, ids, stops), None
        if not talk.history.goes_on(new, chosen, answers=answers):
            start = talk.context.checkpoint(chosen)
        try:
            turn = talk.history.next_turn(new, chosen, answers=answers)
        except BaseException:
            talk.context.release(start)
            raise
        yield from talk.history.read_in_slices(turn, callbacks, start)
        if answers:
            break
    if checkpoint_at(talk.context, len(talk.token_ids)) is None:
        talk.context.checkpoint(chosen)
    _thin_out(talk.context)
    yield from talk.context.answer(turn, callbacks.cancel, in_words=False, ignore_eos=ignore_eos)


def cuts_anywhere(model: LoadedModel) -> bool:
    """Whether all layers keep what they read, so that a whole cache can be cut back to any number
    of tokens."""
    return not model.shape.recurrent_layers and not any(model.shape.window_sizes)


def _pauses(model: LoadedModel, config: EngineConfig) -> bool:
    """Whether a checkpoint in the middle of a prompt helps, and changes nothing that is kept."""
    recalls = config.settings.recall != "off" and can_recall(config.method)
    rounds = recalls and config.recall_bits is not None
    if cuts_anywhere(model) and not rounds:
        return False
    return (recalls or config.budget.auto) and config.settings.beyond_context != "compact"


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


def _thin_out(context: Context) -> None:
    """Free the checkpoints that are closest behind others, so that least has to be read without
    them; never the last."""
    while len(context.checkpoints) > MOST_CHECKPOINTS:
        *held, _ = sorted(context.checkpoints, key=lambda each: each.seen)
        pairs = pairwise([Checkpoint(), *held])
        context.release(min(pairs, key=lambda pair: pair[1].seen - pair[0].seen)[1])


def ways_back(context: Context, most: int) -> list[Checkpoint]:
    """Checkpoints of the first `most` tokens, or of fewer, the last first."""
    cut = checkpoint_at(context, most)
    held = [each for each in context.checkpoints if each.seen <= most]
    return sorted([*([] if cut is None else [cut]), *held], key=lambda each: -each.seen)


def checkpoint_at(context: Context, most: int) -> Checkpoint | None:
    """A checkpoint of the first `most` tokens, or of as many as the host store has of them, or end
    where what is quantized can be cut; None if store and cache cannot be cut back to any number of
    tokens."""
    cache, store = context.cache, context.store
    if store is not None and store.begun:
        if not HostKVCheckpoint(store).plain:
            return None
        held = HostKVCheckpoint(store, min(most, store.seen))
        return Checkpoint(held.seen, [], context.notes, cache.reconstructed, store=held)
    if cache.writing or cache.states:  # which are of later tokens
        return None
    most = min(most, cache.seen)
    edges = [None if layer.rows else edge(layer, most) for layer in cache.layers]
    if None in edges:
        return None
    most = min((each for each in edges if each is not None), default=0)
    layers = [LayerState(Mark(most, None, 0)) for _ in cache.layers]
    return Checkpoint(most, [], context.notes, cache.reconstructed, layers=layers)
