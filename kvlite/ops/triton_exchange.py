"""Entries put in the place of others, wherever a device decided, all KV heads in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def put_entries(
    entries: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    comes: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    rows: Tensor | None,
) -> None:
    """Write some of n entries a KV head.

    Args:
        entries: keys and values `(batch, heads, n, dim)`, positions `(batch, heads, n)`.
        slots: where each goes, `(batch, heads, n)` int64.
        comes: whether it does, `(batch, heads, n)` bool.
        into: keys and values `(batch, heads, slots, dim)`, each of a head's entries right behind
            the one before, and positions `(batch, heads, slots)`.
        rows: `(batch, heads, R, slots)`, where an entry that came has 0; or None.
    """
    keys, values, positions = (each.contiguous() for each in entries)
    own_keys, own_values, own_positions = into
    batch, heads, count, dim = keys.shape
    with torch.cuda.device_of(keys):
        _exchange[count, heads, batch](
            keys,
            values,
            positions,
            slots.contiguous(),
            comes.contiguous().view(torch.uint8),
            own_keys,
            own_values,
            own_positions,
            rows,
            *own_keys.stride()[:2],
            *own_positions.stride()[:2],
            *((0, 0, 0) if rows is None else rows.stride()[:3]),
            ROWS=0 if rows is None else rows.shape[2],
            DIM=dim,
            WIDE=triton.next_power_of_2(dim),
            num_warps=1,
        )


@triton.jit
def _exchange(
    keys,
    values,
    positions,
    slots,
    comes,
    own_keys,
    own_values,
    own_positions,
    rows,
    o_batch,
    o_head,
    p_batch,
    p_head,
    r_batch,
    r_head,
    r_row,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One entry of one KV head."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    entry = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    if tl.load(comes + entry) != 0:
        slot = tl.load(slots + entry)
        channels = tl.arange(0, WIDE)
        inside = channels < DIM
        to = batch * o_batch + head * o_head + slot * DIM + channels
        tl.store(own_keys + to, tl.load(keys + entry * DIM + channels, mask=inside), mask=inside)
        value = tl.load(values + entry * DIM + channels, mask=inside)
        tl.store(own_values + to, value, mask=inside)
        if rows is not None:
            for row in range(ROWS):
                tl.store(rows + batch * r_batch + head * r_head + row * r_row + slot, 0.0)
        position = tl.load(positions + entry).to(tl.int32)
        tl.store(own_positions + batch * p_batch + head * p_head + slot, position)
