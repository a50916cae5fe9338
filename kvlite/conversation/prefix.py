"""Answering a whole prompt of which a conversation has read the beginning already.

Programs send everything said each time. What their tokens have in common with those that were read
stays, whoever wrote them; the rest is read. Only token ids count, not messages.
"""

from collections.abc import Generator, Sequence
from typing import Any

from kvlite.cache.layer import Mark
from kvlite.config.settings import Settings
from kvlite.conversation.branch import Branch
from kvlite.conversation.checkpoint import Checkpoint, LayerState, whole
from kvlite.conversation.context import Context
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.turn_config import TurnConfig
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.load import LoadedModel
from kvlite.offload.kv.checkpoint import HostKVCheckpoint

# The last tokens of a prompt choose what the cache keeps: so many are read together with it, even
# if some were read before.
CHOOSING = 64


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
    token_ids: Sequence[int],
    *,
    ignore_eos: bool = False,
    callbacks: Callbacks = NO_CALLBACKS,
    **settings: Any,
) -> Generator[Piece | None, float | None]:
    """Answer a whole prompt (at least one token) in a conversation that is held in tokens alone.

    Args and errors are those of `Conversation.stream_tokens`. After an error the conversation has
    read the beginning of the prompt, or what it had read before.

    Yields:
        None between two slices of the reading, then pieces.
    """
    chosen = talk.config.after_load(settings)
    new, start = [*token_ids[len(talk.token_ids) :]], None
    if not talk.history.goes_on(new, chosen):
        talk.context.end_step(chosen)
        _seek_to(talk, token_ids, chosen, callbacks)
        start, new = talk.context.checkpoint(chosen), [*token_ids[len(talk.token_ids) :]]
    try:
        turn = talk.history.next_turn(new, chosen)
    except BaseException:
        talk.context.release(start)
        raise
    yield from talk.history.read_in_slices(turn, callbacks, start)
    if checkpoint_at(talk.context, len(talk.token_ids)) is None:
        talk.context.checkpoint(chosen)
    yield from talk.context.answer(turn, callbacks.cancel, in_words=False, ignore_eos=ignore_eos)


def _seek_to(
    talk: Conversation, ids: Sequence[int], config: EngineConfig, callbacks: Callbacks
) -> None:
    """Be as after a beginning of `ids`, the longest that can be had without reading."""
    context, known = talk.context, known_ids(talk)
    same = min(common(known, ids), len(ids) - 1)
    goes_on, wanted = same == len(known), same
    store = context.store
    if store is not None and store.begun:  # which reads the last answer again anyway
        few = len(ids) - min(same, store.seen) < CHOOSING
        wanted = min(same, max(0, len(ids) - CHOOSING)) if few else same
    if wanted >= len(context.token_ids):
        return
    end = checkpoint_at(context, wanted)
    if end is None and goes_on:
        return
    context.release(*(each for each in context.checkpoints if each.seen > same))
    end = end or max(context.checkpoints, key=lambda each: each.seen, default=Checkpoint())
    context.seek(ids[: end.seen], end, (), (), config, callbacks)


def checkpoint_at(context: Context, most: int) -> Checkpoint | None:
    """A checkpoint of the first `most` tokens, or of as many as the host store has of them; None if
    store and cache cannot be cut back to any number of tokens."""
    cache, store = context.cache, context.store
    if store is not None and store.begun:
        if not HostKVCheckpoint(store).plain:
            return None
        held = HostKVCheckpoint(store, min(most, store.seen))
        return Checkpoint(held.seen, [], context.notes, cache.reconstructed, store=held)
    if cache.writing or cache.states:  # which are of later tokens
        return None
    if not all(whole(layer, most) and not layer.rows for layer in cache.layers):
        return None
    layers = [LayerState(Mark(most, None, 0)) for _ in cache.layers]
    return Checkpoint(most, [], context.notes, cache.reconstructed, layers=layers)
