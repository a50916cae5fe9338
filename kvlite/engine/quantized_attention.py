"""Attention of one token to a head group with a compressed segment, which is never restored all at
once."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup
from kvlite.cache.packed import Packed
from kvlite.cache.quantized import Quantized, has_compiled, rotation
from kvlite.cache.segment import CompressedSegment
from kvlite.engine.compiled_rows import NO_STORE, RECALLING, addresses
from kvlite.ops.attention import grouped
from kvlite.ops.device import has_triton
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


def attend_segment(
    q: Tensor,
    head_group: KVHeadGroup,
    softmax: Softmax,
    *,
    remembers: bool,
    fill: DeviceFill | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decode attention over what a head group holds, its segment a part at a time.

    Args:
        q: `(batch, heads, 1, dim)`.
        softmax: of the head group's heads.
        remembers: whether the probabilities are wanted.
        fill: how much it holds, unless the host knows.

    Returns:
        output in the shape of q, and the probabilities averaged over a KV head's queries,
        `(batch, kv heads, used)` float32; with a `fill` of all slots that it will ever have.
    """
    queries = grouped(q, len(head_group.heads))[:, :, :, 0].float() * softmax.scale
    if has_kernel(q.device, head_group):
        out, weights = fused(queries, head_group, softmax, remembers, fill)
    elif fill is None and compiles(head_group):
        out, weights = compiled(queries, head_group, softmax, remembers)
    else:
        out, weights = in_parts(queries, head_group, softmax, remembers, fill)
    row = None if weights is None else weights.mean(2)
    return out.flatten(1, 2)[:, :, None].to(q.dtype), row


def has_kernel(device: torch.device, head_group: KVHeadGroup) -> bool:
    """Whether a head group's segment can be attended to by one kernel, on CUDA."""
    segment = head_group.segment
    each_by_itself = isinstance(segment, Packed) and isinstance(segment.keys, Quantized)
    return each_by_itself and has_triton(device, head_group.residual_keys.shape[3])


def compiles(head_group: KVHeadGroup) -> bool:
    """Whether compiled loops attend to a head group: on a CPU, one sequence in float32, and no
    more than one thread's work."""
    segment, keys = head_group.segment, head_group.residual_keys
    return (
        isinstance(segment, Packed)
        and isinstance(segment.keys, Quantized)
        and has_compiled(keys.device)
        and keys.shape[0] == 1
        and keys.dtype == torch.float32
        and segment.keys.codes.numel() < MOST_CODES
    )


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
    segment = head_group.segment
    if fill is None or fill.packed is None:
        return segment
    assert isinstance(segment, Packed)
    return segment.storage


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


def compiled(
    queries: Tensor, head_group: KVHeadGroup, softmax: Softmax, remembers: bool
) -> tuple[Tensor, Tensor | None]:
    """As `in_parts`, on a CPU by a few compiled loops."""
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
    """As `in_parts`, the segment by one kernel on CUDA, merged with the exact entries."""
    # torch brings triton along on CUDA alone.
    from kvlite.ops.triton_decode import attend_quantized

    segment = _seen(head_group, fill)
    assert isinstance(segment, Packed)
    assert isinstance(segment.keys, Quantized) and isinstance(segment.values, Quantized)
    near, values = _exact(queries, head_group, softmax, fill)
    hadamard = rotation(queries.shape[-1], queries.device)
    shift = (queries @ segment.mean[..., None]).squeeze(-1)
    far = None
    if remembers:
        far = queries.new_full((*queries.shape[:3], segment.count), -torch.inf)
    given = queries, segment.keys, segment.values, hadamard, shift, softmax.softcap
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
    before, after = near.tensor_split([segment.start], -1)
    logits = _by_slot(head_group, before, far, after, fill, -torch.inf)
    return out, (logits - whole[..., None]).exp_()
