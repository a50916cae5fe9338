"""Where a conversation can be cut back to without reading again."""

from collections.abc import Iterable
from itertools import pairwise

from kvlite.cache.cut import edge
from kvlite.cache.layer import Mark
from kvlite.conversation.checkpoint import Checkpoint, LayerState
from kvlite.conversation.context import Context
from kvlite.offload.kv.checkpoint import HostKVCheckpoint


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


def densest(checkpoints: Iterable[Checkpoint]) -> Checkpoint:
    """The one of several that is closest behind another, so that least has to be read without it;
    not the last."""
    *held, _ = sorted(checkpoints, key=lambda each: each.seen)
    pairs = pairwise([Checkpoint(), *held])
    return min(pairs, key=lambda pair: pair[1].seen - pair[0].seen)[1]
