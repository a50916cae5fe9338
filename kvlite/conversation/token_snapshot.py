"""Light files: conversations without their caches, which are read again when one is opened."""

from dataclasses import replace

from kvlite.config.settings import Settings
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.context import Context
from kvlite.conversation.history_file import history_from
from kvlite.conversation.session_state import SessionState, TokenState
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore
from kvlite.offload.kv.checkpoint import HostKVCheckpoint


def read_again(
    model: LoadedModel, settings: Settings, saved: TokenState, callbacks: Callbacks = NO_CALLBACKS
) -> SessionState:
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
    (branches, current), context = history_from(saved.history, None, layers), Context(model)
    boundaries = [each for each in branches[current].prefill_boundaries if each <= len(ids)]
    context.oom_policy.taken = saved.fallbacks
    end = Checkpoint(len(ids), saved.pending_ids, saved.notes, 0, lost=True)
    told = _over_all(callbacks, context, boundaries, len(ids))
    context.seek(ids, end, (), boundaries, config, told)
    context.release(end)
    if callbacks.progress is not None and ids:
        callbacks.progress(len(ids), len(ids))  # the next turn may be what reads the last answer
    branches, current = history_from(saved.history, _returns(context.store), layers)
    branches[current].prefilled_ids = saved.prefilled_ids
    return SessionState(
        cache=context.cache,
        store=context.store,
        token_ids=context.token_ids,
        branches=branches,
        current=current,
        documents=saved.documents,
        pending_ids=saved.pending_ids,
        notes=saved.notes,
        fallbacks=context.oom_policy.taken,
    )


def _returns(store: HostKVStore | None) -> HostKVStore | None:
    """A host store that can return to any moment of which no more is known than how much was
    read."""
    return store if store is not None and store.begun and HostKVCheckpoint(store).plain else None


def _over_all(
    callbacks: Callbacks, context: Context, boundaries: list[int], total: int
) -> Callbacks:
    """The same listeners, told of the whole way in tokens."""
    told = callbacks.progress
    if told is None:
        return callbacks

    def progress(done: int, of: int) -> None:
        start = len(context.token_ids)
        end = next((each for each in boundaries if each > start), total)
        told(start + (end - start) * done // of, total)

    return replace(callbacks, progress=progress)
