"""A layer's step for several conversations on a CPU, in one compiled call. Most of a small model's
step is separate for each conversation, and would otherwise take a call for each."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, KVSize, LayerCache
from kvlite.cache.changes import Change, make_all
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.offload.kv.recall import Recall, is_ordered
from kvlite.offload.kv.store import INDEXED_AT_ONCE, HostKVLayer
from kvlite.offload.kv.swap import CANDIDATES, RECENT, SINKS
from kvlite.ops.loops import Loops
from kvlite.ops.softmax import Softmax

if TYPE_CHECKING:
    from kvlite.engine.layer_step import LayerStep

# Channels of a layer's keys from which on torch's threads take the work of one conversation, where
# they are so many times the KV heads, by which compiled loops share it out.
MANY, TIMES = 1 << 19, 4
# As `numba_rows.attend` takes it.
RECALLING = INDEXED_AT_ONCE, CANDIDATES, SINKS, RECENT


def plain(steps: Sequence["LayerStep"], q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """Which of some steps through a layer do no more than write an entry, fetch others and attend,
    all in float32."""
    if not _compiles(steps[0], q, k, v):
        return []
    return [row for row, step in enumerate(steps) if is_plain(step)]


def takes(step: "LayerStep", q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a step by itself is such a one, and no more than one thread's work."""
    return _compiles(step, q, k, v) and len(q) == 1 and is_small(step) and is_plain(step)


def is_small(step: "LayerStep") -> bool:
    """Whether a step through a layer is too little for torch's threads, or these are few."""
    layer = step.layer
    return _is_small(layer.kv_heads, layer.keys.shape[2] * max(used for _, used in layer.lengths))


def loops_for(
    policies: Sequence[LayerPolicy], size: KVSize, recall: Recall | None
) -> Iterator[Loops]:
    """What loops steps need through layers whose KV heads have such a size."""
    yield Loops.STEP
    coded = any(policy.bits is not None for policy in policies)
    if coded:
        yield Loops.CODES
    if recall is None or not recall.entries:
        return
    yield Loops.RECALL
    if coded or recall.store.bits is not None:
        yield Loops.CODES_BACK
    if coded or not _is_small(size.heads, size.dim * max(policy.budget for policy in policies)):
        yield Loops.RECALL_ALONE


def _is_small(heads: int, channels: int) -> bool:
    return heads * channels < MANY or torch.get_num_threads() < TIMES * heads


def _compiles(step: "LayerStep", q: Tensor, k: Tensor, v: Tensor) -> bool:
    return step.implementation.takes_rows and q.shape[2] == 1 and k.shape == v.shape


def is_plain(step: "LayerStep") -> bool:
    """Whether a step through a layer in float32 does no more than is compiled."""
    layer, source = step.layer, source_of(step)
    method = step.policy.method
    if step.sparse_mask is not None or method.across.resolves_at == "step":
        return False
    if step.again and method.decoding.evict is not None:  # the token may be there already
        return False
    if source is not None and not (
        source.room >= len(step.positions)
        and _only_appends(source.cache, step)
        and is_ordered(source.head_group)
    ):
        return False
    return layer.uniform and _only_appends(layer, step)


def _only_appends(layer: LayerCache, step: "LayerStep") -> bool:
    head_group, exact = layer.head_groups[0], layer.keys.dtype == torch.float32
    free = head_group.has_kernels and head_group.rows is None
    return exact and free and head_group.room >= len(step.positions)


def source_of(step: "LayerStep") -> HostKVLayer | None:
    """The layer's part of the host store, if the answer goes there."""
    source = None if step.recall is None else step.recall.store.layers[step.index]
    return None if source is None or source.index is None else source


def attend(
    steps: Sequence["LayerStep"], q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
) -> Tensor:
    """As each of some `plain` steps would with its row of queries, keys and values."""
    from kvlite.ops.numba_rows import attend as compiled

    kv_heads, sinks = k.shape[1], softmax.sinks
    lines = [line(step) for step in steps]
    for row, step in enumerate(steps):
        if step.queries is not None:
            step.queries.write(step.positions, q[row : row + 1], softmax)
    queries = q.numpy().reshape(len(q), kv_heads, -1, q.shape[3])
    out, num_fetched = compiled(
        queries * np.float32(softmax.scale),
        np.ascontiguousarray(k.numpy()[:, :, 0]),
        np.ascontiguousarray(v.numpy()[:, :, 0]),
        lines,
        softmax.softcap,
        None if sinks is None else sinks.float().view(kv_heads, -1).contiguous().numpy(),
        RECALLING,
    )
    count([steps], [lines], [num_fetched.tolist()])
    return torch.from_numpy(out).view(q.shape)


def line(step: "LayerStep", token: int = 0) -> list[int]:
    """Where one of a step's tokens goes, and what it fetches, as `ops.numba_rows` wants it."""
    held, source, position = step.layer.head_groups[0], source_of(step), step.position + token
    own, used = addresses(held, token), held.used + token
    if source is None or step.recall is None or source.index is None:
        return [*own, *NO_STORE, position, 0]
    index, wanted, read = source.index, step.recall.count(used + 1), source.head_group.used + token
    fetches = used < read and wanted > SINKS + RECENT
    of_index = [each.data_ptr() for each in index.tensors]
    indexed = source.num_indexed(read, index.used)
    stored = *addresses(source.head_group, token), *of_index, index.capacity, indexed
    return [*own, *stored, position, wanted if fetches else 0]


def addresses(head_group: KVHeadGroup, token: int) -> list[int]:
    """Of what a head group holds, as `ops.numba_rows` wants it, once so many tokens more and
    another are there."""
    own = head_group.residual_keys, head_group.residual_values, head_group.residual_positions
    exact = [*(each.data_ptr() for each in own), own[0].shape[2], head_group.used + token + 1]
    segment = head_group.packed
    if segment is None:
        return exact + _NONE_PACKED
    keys, values = segment.for_kernels
    bits = keys.bits, values.bits, keys.groups, values.groups
    packed = [each.data_ptr() for each in segment.tensors]
    return [*exact, segment.count, segment.capacity, segment.start, *bits, *packed]


_NONE_PACKED = [0] * 15
NO_STORE = [0] * (5 + len(_NONE_PACKED) + 6)


def count(
    rows: Sequence[Sequence["LayerStep"]],
    lines: Sequence[Sequence[list[int]]],
    num_fetched: Sequence[Sequence[int]],
) -> None:
    """Let the tokens of each conversation count in some layers.

    Args:
        rows: of each layer and conversation the step.
        lines, num_fetched: of each layer and token its line, and how many entries came.
    """
    tokens = len(lines[0]) // len(rows[0])
    made = [*chain.from_iterable(_counted(step, tokens) for step in chain.from_iterable(rows))]
    for each, first in enumerate(rows[0]):
        if first.recall is not None:
            own = slice(each * tokens, (each + 1) * tokens)
            heads = [len(row[each].layer.head_groups[0].heads) for row in rows]
            wanted = sum(
                sum(line[-1] for line in layer[own]) * some
                for layer, some in zip(lines, heads, strict=True)
            )
            made += first.recall.counted(wanted, sum(sum(brought[own]) for brought in num_fetched))
    make_all(made)


def _counted(step: "LayerStep", tokens: int) -> Iterator[Change]:
    """What lets a step's tokens count."""
    held, source = step.layer.head_groups[0], source_of(step)
    yield held, "used", held.used + tokens
    if source is not None and source.index is not None:
        yield from source.filled_to(source.head_group.used + tokens, source.index.used)
