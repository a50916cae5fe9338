"""Decode attention over all KV heads of a layer in one launch, whatever each of them holds.

Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023) over flat storage: each KV head's entries lie in
a run of slots of its own, and how far it is filled is read on the device. So the same launch serves
every token, and a CUDA graph can hold it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.softmax import Softmax
from kvlite.ops.triton_decode import MERGED_AT_ONCE, merge_splits, splits_for

TILE = 64
WEIGHED = 1024


def attend_ragged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    last: Tensor,
    longest: int,
    softmax: Softmax,
    weights: Tensor | None = None,
) -> Tensor:
    """Attention of one token over what each KV head holds; see `ops.attention.attend_ragged`, whose
    arguments and result these are."""
    (batch, heads, rows, dim), total = q.shape, keys.shape[1]
    splits = splits_for(batch * heads, longest, q.device)
    outs = torch.empty(batch, heads, splits, rows, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(batch, heads, splits, rows, dtype=torch.float32, device=q.device)
    out, lse = torch.empty_like(q), lses.new_empty(batch, heads, rows)
    logits = None if weights is None else lses.new_empty(batch, rows, total)
    wide = 1 << (dim - 1).bit_length()
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(q):
        _attend_split[batch * heads, splits](
            q.contiguous(), keys, values, starts, last, outs, lses, logits, total, heads,
            softmax.scale, softmax.softcap,
            ROWS=rows, LANES=max(8, 1 << (rows - 1).bit_length()), DIM=dim, WIDE=wide, TILE=TILE,
            OPERAND=operand(q),
            num_warps=4, num_stages=2,
        )  # fmt: skip
        merge_splits[batch * heads * rows,](
            outs, lses, out, lse, splits, ROWS=rows, DIM=dim, WIDE=wide, BLOCK=MERGED_AT_ONCE
        )
        out, lse = softmax.with_sinks(out, lse)
        if weights is not None:
            _weights[batch * heads, -(-longest // WEIGHED)](
                *(logits, lse, weights, starts, last, total, heads),
                ROWS=rows,
                BLOCK=WEIGHED,
            )
    return out


def operand(tensor: Tensor) -> tl.dtype:
    """The type that a tensor has in products; Triton's interpreter on a CPU multiplies no
    bfloat16."""
    return _OPERANDS[tensor.dtype] if tensor.is_cuda else tl.float32


_OPERANDS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit(do_not_specialize=["total"])
def _attend_split(
    queries, keys, values, starts, last, outs, lses, logits, total, heads, scale, softcap,
    ROWS: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """One split of one KV head: its output `(rows, dim)` and lse. Logits lie as `(TILE, LANES)`, a
    row a column; output as `(WIDE, LANES)`."""
    line = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch, head = line // heads, line % heads
    first = tl.load(starts + head)
    length = (tl.load(last + head) - first + 1).to(tl.int32)
    begin = (batch * total + first) * DIM
    part = tl.cdiv(tl.cdiv(length, TILE), tl.num_programs(1)) * TILE
    start = split * part
    stop = tl.minimum(start + part, length)

    lanes = tl.arange(0, LANES)
    channels = tl.arange(0, WIDE)
    real = lanes < ROWS
    inside = channels < DIM
    asked = queries + (line * ROWS + lanes[None, :]) * DIM + channels[:, None]
    asked = tl.load(asked, mask=inside[:, None] & real[None, :], other=0.0).to(OPERAND)

    top = tl.full((LANES,), -float("inf"), tl.float32)
    mass = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((WIDE, LANES), tl.float32)
    for at in range(start, stop, TILE):
        entries = at + tl.arange(0, TILE)
        held = entries < stop
        places = begin + entries.to(tl.int64)[:, None] * DIM + channels[None, :]
        there = held[:, None] & inside[None, :]
        # What is not filled may be anything, and is not read.
        key = tl.load(keys + places, mask=there, other=0.0).to(OPERAND)
        value = tl.load(values + places, mask=there, other=0.0).to(OPERAND)
        logit = tl.dot(key, asked, input_precision="ieee") * scale
        if softcap is not None:
            logit = softcap - 2 * softcap / (1 + tl.exp(logit * (2 / softcap)))
        if logits is not None:
            to = logits + (batch * ROWS + lanes[None, :]) * total + first + entries[:, None]
            tl.store(to, logit, mask=held[:, None] & real[None, :])
        logit = tl.where(held[:, None], logit, -float("inf"))
        # A tile has at least one entry, so the maximum is finite.
        new_top = tl.maximum(top, tl.max(logit, 0))
        keep = tl.exp(top - new_top)
        top = new_top
        weight = tl.exp(logit - top[None, :])
        mass = mass * keep + tl.sum(weight, 0)
        sums = tl.dot(
            tl.trans(value), weight.to(OPERAND), sums * keep[None, :], input_precision="ieee"
        )

    # 1 stands for the weight of no entries, the -inf of their lse comes from `top`.
    whole = tl.where(mass > 0, mass, 1.0)
    line = (line * tl.num_programs(1) + split) * ROWS
    tl.store(lses + line + lanes, top + tl.log(whole), mask=real)
    places = outs + (line + lanes[None, :]) * DIM + channels[:, None]
    tl.store(places, sums / whole[None, :], mask=inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=["total"])
def _weights(
    logits, lses, weights, starts, last, total, heads,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Probabilities of some slots of one KV head, the mean of its rows; 0 where nothing is."""
    line = tl.program_id(0).to(tl.int64)
    batch, head = line // heads, line % heads
    first = tl.load(starts + head)
    end = tl.load(last + head)
    stop = total.to(tl.int64)
    if head + 1 < heads:
        stop = tl.load(starts + head + 1)
    slots = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.float32)
    for row in range(ROWS):
        own = tl.load(
            logits + (batch * ROWS + row) * total + slots, mask=slots <= end, other=-float("inf")
        )
        weight += tl.exp(own - tl.load(lses + line * ROWS + row))
    weight = tl.where(slots <= end, weight / ROWS, 0.0)
    tl.store(weights + batch * total + slots, weight, mask=slots < stop)
