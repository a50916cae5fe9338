"""A token's keys and values written into flat storage, all KV heads in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def write_token(
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
    slots: Tensor | None = None,
) -> None:
    """Write one entry a KV head.

    Args:
        keys, values: `(batch, heads, dim)`.
        position: the token's, `(1,)`.
        into: keys and values `(batch, heads or slots, dim)` and positions `(batch, heads or
            slots)`; row h belongs to head h or, if there are `slots`, row `slots[h]`.
        slots: `(heads,)` int64.
    """
    own_keys, own_values, own_positions = into
    batch, heads, dim = keys.shape
    with torch.cuda.device_of(keys):
        _write[batch, heads](
            keys, values, position, own_keys, own_values, own_positions, slots,
            *keys.stride()[:2], *values.stride()[:2], *own_keys.stride()[:2],
            *own_positions.stride(),
            DIM=dim, WIDE=triton.next_power_of_2(dim),
            num_warps=1,
        )  # fmt: skip


@triton.jit
def _write(
    keys, values, position, own_keys, own_values, own_positions, slots,
    k_batch, k_head, v_batch, v_head, o_batch, o_head, p_batch, p_head,
    DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, WIDE)
    inside = channels < DIM
    row = head if slots is None else tl.load(slots + head)
    to = batch * o_batch + row * o_head + channels
    key = tl.load(keys + batch * k_batch + head * k_head + channels, mask=inside)
    value = tl.load(values + batch * v_batch + head * v_head + channels, mask=inside)
    tl.store(own_keys + to, key, mask=inside)
    tl.store(own_values + to, value, mask=inside)
    number = tl.load(position).to(own_positions.dtype.element_ty)
    tl.store(own_positions + batch * p_batch + row * p_head, number)
