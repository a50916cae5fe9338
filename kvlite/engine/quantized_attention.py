"""Attention of one token to a head group with a compressed segment, which is never restored all at
once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup
from kvlite.cache.quantization.hadamard import rotation
from kvlite.cache.segment import CompressedSegment
from kvlite.engine.compiled_rows import NO_STORE, RECALLING, addresses
from kvlite.ops.attention import grouped
from kvlite.ops.softmax import Softmax

# Bytes of keys' codes from which on several threads share the work.
MOST_CODES = 1 << 21


@dataclass(frozen=True)
class DeviceFill:
    """How much a head group holds, where only the device knows.

    Attributes:
        last: which of its own slots is the last filled one, `()`; values in those after it are
            finite.
        packed: how many entries of its segment's storage there are, `(1,)`; what is beyond them is
            finite. None if that does not change.
    """

    last: Tensor
    packed: Tensor | None = None


SegmentAttention = Callable[
    [Tensor, KVHeadGroup, Softmax, bool, DeviceFill | None], tuple[Tensor, Tensor | None]
]
"""An implementation of attention to a head group with a compressed segment, as `in_parts`."""


def attend_segment(
    q: Tensor,
    head_group: KVHeadGroup,
    softmax: Softmax,
    attend: SegmentAttention,
    *,
    remembers: bool,
    fill: DeviceFill | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decode attention over what a head group holds, its segment a part at a time.

    Args:
        q: `(batch, heads, 1, dim)`.
        softmax: of the head group's heads.
        attend: the implementation.
        remembers: whether the probabilities are wanted.
        fill: how much it holds, unless the host knows.

    Returns:
        output in the shape of q, and the probabilities averaged over a KV head's queries,
        `(batch, kv heads, used)` float32; with a `fill` of all slots that it will ever have.
    """
    queries = grouped(q, len(head_group.heads))[:, :, :, 0].float() * softmax.scale
    out, weights = attend(queries, head_group, softmax, remembers, fill)
    row = None if weights is None else weights.mean(2)
    return out.flatten(1, 2)[:, :, None].to(q.dtype), row


def in_parts(
    queries: Tensor,
    head_group: KVHeadGroup,
    softmax: Softmax,
    remembers: bool,
    fill: DeviceFill | None = None,
) -> tuple[Tensor, Tensor | None]:
    """On any device: `queries` are `(batch, kv heads, heads per KV head, dim)` float32, scaled; the
    output has their shape, and the probabilities are `(batch, kv heads, heads per KV head,
    used)`."""
    segment = _seen(head_group, fill)
    near, values = _exact(queries, head_group, softmax, fill)
    if segment is None:
        weights = softmax.probabilities(near)
        return weights @ values, weights if remembers else None
    before, after = near.tensor_split([segment.start], -1)
    far = softmax.capped(segment.dot(queries))
    if fill is not None and fill.packed is not None:
        places = torch.arange(far.shape[-1], device=far.device)
        far.masked_fill_(places >= fill.packed, -torch.inf)
    weights = softmax.probabilities(torch.cat([before, far, after], -1))
    first, older, recent = weights.split([each.shape[-1] for each in (before, far, after)], -1)
    out = torch.cat([first, recent], -1) @ values + segment.weigh(older)
    if not remembers:
        return out, None
    return out, _by_slot(head_group, first, older, recent, fill, 0.0)


def _seen(head_group: KVHeadGroup, fill: DeviceFill | None) -> CompressedSegment | None:
    """The segment, or all of its storage where only the device knows how much of that is filled."""
    grows = fill is not None and fill.packed is not None
    return head_group.storage if grows else head_group.segment


def _by_slot(
    head_group: KVHeadGroup,
    first: Tensor,
    older: Tensor,
    recent: Tensor,
    fill: DeviceFill | None,
    nothing: float,
) -> Tensor:
    """What there is of the first few entries, of quantized ones and of the rest, `(..., n)` each,
    by slot, and `nothing` of those that are free."""
    if fill is None or fill.packed is None:
        return torch.cat([first, older, recent], -1)
    behind = first.shape[-1] + fill.packed
    out = torch.cat([first, older, torch.full_like(recent, nothing)], -1)
    slots = behind + torch.arange(recent.shape[-1], device=recent.device)
    out.scatter_(-1, slots.expand_as(recent), recent)
    return out[..., : head_group.capacity]


def _exact(
    queries: Tensor, head_group: KVHeadGroup, softmax: Softmax, fill: DeviceFill | None
) -> tuple[Tensor, Tensor]:
    """Logits and values of a head group's own slots, float32."""
    own = slice(0, head_group.residual_len if fill is None else None)
    keys, values = head_group.residual_keys[:, :, own], head_group.residual_values[:, :, own]
    near = softmax.capped(queries @ keys.float().mT)
    if fill is not None:
        slots = torch.arange(near.shape[-1], device=near.device)
        near.masked_fill_(slots > fill.last, -torch.inf)
    return near, values.float()


def compiles(head_group: KVHeadGroup) -> bool:
    """Whether there are compiled loops for a head group in float32: of one sequence, entries that
    are quantized each by itself, and no more than one thread's work."""
    packed = head_group.packed
    if packed is None or not head_group.has_kernels or len(head_group.residual_keys) > 1:
        return False
    return packed.for_kernels[0].codes.numel() < MOST_CODES


def compiled(
    queries: Tensor,
    head_group: KVHeadGroup,
    softmax: Softmax,
    remembers: bool,
    fill: DeviceFill | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `in_parts`, on a CPU by a few compiled loops where there are any."""
    if fill is not None or not compiles(head_group):
        return in_parts(queries, head_group, softmax, remembers, fill)
    from kvlite.ops.numba_rows import attend

    sinks = None if softmax.sinks is None else softmax.sinks.view(queries.shape[1:3]).numpy()
    weights = np.empty((*queries.shape[:3], head_group.used), np.float32)
    none, line = weights[:, :, 0, :0], [*addresses(head_group, -1), *NO_STORE, 0, 0]
    given = softmax.softcap, sinks, RECALLING, weights
    out, _ = attend(np.ascontiguousarray(queries.numpy()), none, none, [line], *given)
    return torch.from_numpy(out), torch.from_numpy(weights) if remembers else None


def fused(
    queries: Tensor,
    head_group: KVHeadGroup,
    softmax: Softmax,
    remembers: bool,
    fill: DeviceFill | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `in_parts`, on CUDA by one kernel where entries are quantized each by itself, merged with
    the exact entries."""
    segment = _seen(head_group, fill)
    packed = None if segment is None else segment.packed
    if packed is None or not head_group.has_kernels:
        return in_parts(queries, head_group, softmax, remembers, fill)
    # torch brings triton along on CUDA alone.
    from kvlite.ops.triton_decode import attend_quantized

    near, values = _exact(queries, head_group, softmax, fill)
    hadamard = rotation(queries.shape[-1], queries.device)
    shift = (queries @ packed.mean[..., None]).squeeze(-1)
    far = None
    if remembers:
        far = queries.new_full((*queries.shape[:3], packed.count), -torch.inf)
    given = queries, *packed.for_kernels, hadamard, shift, softmax.softcap
    count = None if fill is None else fill.packed
    older, lse = attend_quantized(*given, count=count, logits=far)
    exact = near.softmax(-1) @ values
    own = near.logsumexp(-1)
    out = torch.lerp(exact, older, torch.sigmoid(lse - own)[..., None])
    if far is None and softmax.sinks is None:
        return out, None
    out, whole = softmax.with_sinks(out, torch.logaddexp(lse, own))
    if far is None:
        return out, None
    before, after = near.tensor_split([packed.start], -1)
    logits = _by_slot(head_group, before, far, after, fill, -torch.inf)
    return out, (logits - whole[..., None]).exp_()
