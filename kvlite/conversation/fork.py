"""Conversations that begin as another one did: what it read is copied, not read again."""

import torch

from kvlite.cache import KVCache, LayerCache
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.prefix import checkpoint_at
from kvlite.offload.kv.checkpoint import HostKVCheckpoint
from kvlite.offload.kv.copies import StoreCopies


@torch.inference_mode()
def forked(talk: Conversation, count: int, room: int) -> Conversation | None:
    """A conversation that has read the first `count` tokens of another, which stays as it is; None
    if what that one holds cannot be cut back there, or its host store is on disk.

    Entries are copied. Those in a host store are shared until one of the two writes to their pages.

    Args:
        room: entries that the store's copy may add before it grows.
    """
    model, context = talk.model, talk.context
    end = checkpoint_at(context, count)
    on_disk = context.store is not None and context.store.on_disk
    if end is None or on_disk or end.seen > len(context.token_ids):
        return None
    layers, store = model.empty_cache().layers, None
    if end.store is None:
        made = {id(each): _first(each, end.seen) for each in context.cache.layers}
        layers = [made[id(each)] for each in context.cache.layers]
    elif context.store is not None:
        store = StoreCopies(context.store, room).copy()
        HostKVCheckpoint(store, end.seen).put_back(store)
    cache = KVCache(layers, end.seen, context.cache.reconstructed)
    fork = Conversation(model, talk.settings)
    given_up = [*context.oom_policy.taken]
    fork.context.resume(cache, store, context.token_ids[: end.seen], [], end.notes, given_up)
    return fork


def _first(layer: LayerCache, count: int) -> LayerCache:
    made = layer.empty_like([count])
    (own,), (held,) = made.head_groups, layer.head_groups
    own.copy_first(held, count)
    own.used = count
    return made
