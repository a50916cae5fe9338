"""A whole reading, or none of it: the cache, and the host store, are those after it, or as they
were."""

from functools import partial
from threading import Event

import torch
from torch import Tensor

from kvlite.cache import KVCache
from kvlite.engine.oom_actions import cache_oom_actions
from kvlite.engine.prefill_oom import may_wait
from kvlite.engine.reading import CHUNK, Prefill, Progress
from kvlite.memory.oom import HIDDEN, OOMPolicy
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.methods.placement import ON_DEVICE, ScoringBackend
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore


def empty_cache(model: LoadedModel) -> KVCache:
    """A cache for one sequence of this model, which has seen nothing."""
    shape = model.shape
    return KVCache.empty(
        shape.layers, shape.kv_heads, shape.head_dim, dtype=model.dtype, device=model.device
    )


@torch.inference_mode()
def prefill(
    model: LoadedModel,
    cache: KVCache,
    token_ids: Tensor,
    policies: list[LayerPolicy],
    *,
    context: Tensor | None = None,
    store: HostKVStore | None = None,
    backend: ScoringBackend = ON_DEVICE,
    oom_policy: OOMPolicy | None = None,
    reserve: int = 0,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    cancel: Event | None = None,
) -> Tensor:
    """Read `token_ids` into `cache`, compressing each layer as soon as it is done.

    Args:
        token_ids: `(batch, n)` int64, n >= 1, the tokens that follow what the cache has seen; or,
            with a host store that has begun, what that has seen.
        policies: one a layer; where a method leaves layers to others once it has read, that is put
            here.
        context: `(batch, seen)` int64, the tokens before them; only methods that have the model
            repeat what it read need it.
        store: takes everything that is read. Once it has, layers read on from there, not from the
            cache: reading is exact, and what is kept is chosen anew from all.
        backend: where attention becomes a choice of what is kept.
        oom_policy: what is given up where memory runs out; without it, that is an error.
        reserve: tokens the answer may have; lines that grow get room for up to `ROOM` of them at
            once.
        chunk: tokens that go through a layer together; any value gives the same result, unless the
            method looks at parts of what lies before a chunk.
        progress: told (layer-tokens done, of how many) after every chunk.
        cancel: checked before every chunk.

    Returns:
        Logits of the next token, `(batch, vocab)` float32.

    Raises:
        Stopped: `cancel` was set; the cache is as it was, as after any other exception.
        OutOfMemory: with a OOM policy, if nothing is left to give up.
    """
    beginning = cache_oom_actions(model, cache, policies, token_ids.shape[1]) | {
        HIDDEN: lambda: may_wait(model, oom_policy)
    }
    begin = partial(
        Prefill,
        model,
        cache,
        token_ids,
        policies,
        context=context,
        store=store,
        backend=backend,
        oom_policy=oom_policy,
        reserve=reserve,
        chunk=chunk,
        progress=progress,
        cancel=cancel,
    )
    run = begin() if oom_policy is None else oom_policy.run(begin, beginning)
    try:
        logits = run.read()
    except BaseException:
        run.rewind()
        raise
    cache.layers = run.layers
    cache.seen = run.end
    cache.writing = False
    if store is not None:
        store.read(run.end)
    cache.reconstructed = run.reconstructed
    return logits
