"""Entries written into pinned host memory by a CUDA device itself."""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
