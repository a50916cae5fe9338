"""Entries read from pinned host memory, and written there, by a CUDA device itself.

Nobody has to know on the host which entries they are, so nobody waits for the device to tell.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.heads import runs

BLOCK = 16


def gather_rows(source: Tensor, heads: tuple[int, ...], places: Tensor, needed: Tensor) -> Tensor:
    """Entries of some KV heads, on the device.

    Args:
        source: `(batch, kv heads, slots, dim)`, pinned; a head's entries lie one after the other.
        heads: which of them, ascending.
        places: `(batch, heads, n)` int64.
        needed: `(batch, heads, n)` bool; what is not needed is not read, and 0.

    Returns:
        `(batch, heads, n, dim)` in the source's dtype.
    """
    batch, own, count = places.shape
    dim = source.shape[3]
    out = torch.empty(batch, own, count, dim, dtype=source.dtype, device=places.device)
    given = torch.where(needed, places, -1)
    with torch.cuda.device_of(places):
        for at, first, length in runs(heads):
            _gather[-(-count // BLOCK), length, batch](
                source[:, first],
                given[:, at],
                out[:, at],
                *source.stride()[:2],
                *given.stride()[:2],
                count,
                DIM=dim,
                WIDE=1 << (dim - 1).bit_length(),
                BLOCK=BLOCK,
                num_warps=4,
            )
    return out


def put_rows(rows: Tensor, target: Tensor, place: Tensor | None = None) -> None:
    """Write an entry a KV head, `(batch, kv heads, 1, dim)` on the device, into pinned memory.

    Args:
        target: `(batch, kv heads, n, dim)`, of the same dtype.
        place: which of the n it becomes, `(1,)` int64 on the device; the first by default.
    """
    batch, heads, _, dim = rows.shape
    with torch.cuda.device_of(rows):
        _put[heads, batch](
            rows,
            target,
            place,
            *rows.stride()[:2],
            *target.stride()[:2],
            DIM=dim,
            WIDE=1 << (dim - 1).bit_length(),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["count"])
def _gather(
    source,
    places,
    out,
    s_batch,
    s_head,
    p_batch,
    p_head,
    count,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some entries of one KV head; nothing where a place is -1."""
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    channels = tl.arange(0, WIDE)
    at = batch * p_batch + head * p_head + entries
    place = tl.load(places + at, mask=entries < count, other=-1)
    begin = batch * s_batch + head * s_head + place * DIM
    held = (place >= 0)[:, None] & (channels < DIM)[None, :]
    numbers = tl.load(source + begin[:, None] + channels[None, :], mask=held, other=0.0)
    real = (entries < count)[:, None] & (channels < DIM)[None, :]
    tl.store(out + at[:, None] * DIM + channels[None, :], numbers, mask=real)


@triton.jit
def _put(
    rows,
    target,
    place,
    r_batch,
    r_head,
    t_batch,
    t_head,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """An entry of one KV head."""
    head = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, WIDE)
    held = channels < DIM
    numbers = tl.load(rows + batch * r_batch + head * r_head + channels, mask=held)
    if place is not None:
        target += tl.load(place) * DIM
    tl.store(target + batch * t_batch + head * t_head + channels, numbers, mask=held)
