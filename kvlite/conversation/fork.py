"""Conversations that begin as another one did: what it read is copied, not read again."""

import torch

from kvlite.cache import KVCache
from kvlite.conversation.checkpoint import restored
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.ways_back import ways_back
from kvlite.offload import HostKVStore
from kvlite.offload.kv.copies import StoreCopies


def begun(talk: Conversation, most: int) -> int:
    """How many of the first `most` tokens of a conversation another can begin with."""
    return next((end.seen for end in ways_back(talk.context, most)), 0)


@torch.inference_mode()
def forked(talk: Conversation, most: int, room: int) -> Conversation | None:
    """A conversation that has read the first `most` tokens of another, which stays as it is; or as
    many of them as what that one holds can be cut back to. None if those are none.

    Entries are copied. Those in a host store are shared until one of the two writes to their pages.

    Args:
        room: entries that the store's copy may add before it grows.
    """
    model, context = talk.model, talk.context
    store: HostKVStore | None = None
    cache: KVCache | None = None
    for end in filter(lambda each: each.seen, ways_back(context, most)):
        if end.store is None:
            cache = restored(model, end, context.cache, context.store, as_copy=True)
        elif context.store is not None and end.store.fits(context.store):
            store = StoreCopies(context.store, room).copy()
            end.store.put_back(store)
            cache = KVCache(model.empty_cache().layers, end.seen, end.reconstructed)
        if cache is not None:
            fork = Conversation(model, talk.settings)
            given_up = [*context.oom_policy.taken]
            ids = context.token_ids[: end.seen]
            fork.context.resume(cache, store, ids, [], end.notes, given_up)
            return fork
    return None
