"""A whole reading, or none of it: the cache, and the tier, are those after it, or as they were."""

from functools import partial
from threading import Event

import torch
from torch import Tensor

from kvlite.cache import KVCache
from kvlite.engine.oom_actions import cache_offers
from kvlite.engine.prefill_oom import may_wait
from kvlite.engine.reading import CHUNK, Progress, Reading
from kvlite.memory.oom import HIDDEN, Ladder
from kvlite.methods.layer_policy import Rule
from kvlite.methods.placement import ON_DEVICE, Desk
from kvlite.model.load import LoadedModel
from kvlite.offload import Tier


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
    rules: list[Rule],
    *,
    context: Tensor | None = None,
    tier: Tier | None = None,
    desk: Desk = ON_DEVICE,
    ladder: Ladder | None = None,
    reserve: int = 0,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    cancel: Event | None = None,
) -> Tensor:
    """Read `token_ids` into `cache`, compressing each layer as soon as it is done.

    Args:
        token_ids: `(batch, n)` int64, n >= 1, the tokens that follow what the cache has seen; or,
            with a tier that has begun, what that has seen.
        rules: one a layer; where a method settles once it has read, that is put here.
        context: `(batch, seen)` int64, the tokens before them; only methods that have the model
            repeat what it read need it.
        tier: takes everything that is read. Once it has, layers read on from there, not from the
            cache: reading is exact, and what is kept is chosen anew from all.
        desk: where attention becomes a choice of what is kept.
        ladder: what is given up where memory runs out; without it, that is an error.
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
        OutOfMemory: with a ladder, if nothing is left to give up.
    """
    beginning = cache_offers(model, cache, rules, token_ids.shape[1]) | {
        HIDDEN: lambda: may_wait(model, ladder)
    }
    begin = partial(
        Reading,
        model,
        cache,
        token_ids,
        rules,
        context=context,
        tier=tier,
        desk=desk,
        ladder=ladder,
        reserve=reserve,
        chunk=chunk,
        progress=progress,
        cancel=cancel,
    )
    reading = begin() if ladder is None else ladder.run(begin, beginning)
    try:
        logits = reading.read()
    except BaseException:
        reading.rewind()
        raise
    cache.layers = reading.layers
    cache.seen = reading.end
    cache.writing = False
    if tier is not None:
        tier.read(reading.end)
    cache.rehearsed = reading.rehearsed
    return logits
