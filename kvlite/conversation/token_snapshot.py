"""Light files: conversations without their caches, which are read again when one is opened."""

from dataclasses import replace

from kvlite.config.settings import Settings
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.context import Context
from kvlite.conversation.recorded import walked
from kvlite.conversation.session_state import Held, Unread
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore
from kvlite.offload.kv.checkpoint import HostKVCheckpoint


def read_again(
    model: LoadedModel, settings: Settings, saved: Unread, callbacks: Callbacks = NO_CALLBACKS
) -> Held:
    """What a conversation goes on from, once its tokens are read again, in the parts in which they
    were read before.

    Args:
        settings: of the conversation: all of it is read by them, also what was once read by others.
        callbacks: follows the reading; its progress is told (tokens, of how many), of all parts
            together.

    Raises:
        Stopped: `callbacks.cancel` was set.
        OutOfMemory, ContextError, SettingError: as of a turn.
    """
    ids, layers = saved.token_ids, model.shape.layers
    config = EngineConfig.from_settings(settings)
    (paths, at), context = walked(saved.ways, None, layers), Context(model)
    stops = [stop for stop in paths[at].stops if stop <= len(ids)]
    context.oom_policy.taken = saved.given_up
    end = Checkpoint(len(ids), saved.pending, saved.noted, 0, lost=True)
    context.seek(ids, end, (), stops, config, _over_all(callbacks, context, stops, len(ids)))
    context.leave(end)
    if callbacks.progress is not None and ids:
        callbacks.progress(len(ids), len(ids))  # the next turn may be what reads the last answer
    paths, at = walked(saved.ways, _returns(context.store), layers)
    paths[at].ahead = saved.ahead
    return Held(
        cache=context.cache,
        store=context.store,
        token_ids=context.token_ids,
        paths=paths,
        at=at,
        documents=saved.documents,
        pending=saved.pending,
        noted=saved.noted,
        given_up=context.oom_policy.taken,
    )


def _returns(store: HostKVStore | None) -> HostKVStore | None:
    """A host store that can return to any moment of which no more is known than how much was
    read."""
    return store if store is not None and store.begun and HostKVCheckpoint(store).plain else None


def _over_all(callbacks: Callbacks, context: Context, stops: list[int], total: int) -> Callbacks:
    """The same listeners, told of the whole way in tokens."""
    told = callbacks.progress
    if told is None:
        return callbacks

    def progress(done: int, of: int) -> None:
        start = len(context.token_ids)
        end = next((stop for stop in stops if stop > start), total)
        told(start + (end - start) * done // of, total)

    return replace(callbacks, progress=progress)
