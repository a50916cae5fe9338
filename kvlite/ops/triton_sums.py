"""How much attention each entry got from many queries, on a CUDA device, without an n x n matrix.

A program holds a tile of keys, walks over a query head's queries that see it, and forms their
probabilities anew from the log-sum-exp, as the backward pass of FlashAttention-2 does (Dao,
2023, section 3.1). Products are of float16 or bfloat16 on tensor cores, summed in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.device import processors
from kvlite.ops.softmax import Softmax
from kvlite.ops.triton_ragged import operand

PROGRAMS_PER_PROCESSOR = 4
LEAST_STEPS = 4


def attention_of(
    q: Tensor, k: Tensor, lse: Tensor, softmax: Softmax, *, causal: bool, highest: bool
) -> Tensor:
    """What each entry got of L queries' attention; see `ops.attention.attention_of`, whose
    arguments and result these are."""
    (batch, heads, length, dim), (kv_heads, entries) = q.shape, k.shape[1:3]
    wide = max(16, 1 << (dim - 1).bit_length())
    tile = max(16, min(128, (1 << 14) // wide))
    step = max(16, tile // 2)
    lines, tiles = batch * heads, -(-entries // tile)
    splits = splits_for(lines * tiles, -(-length // step), q.device)
    found = torch.empty(splits, batch, heads, entries, dtype=torch.float32, device=q.device)
    q, k = (each if each.stride(3) == 1 else each.contiguous() for each in (q, k))
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(q):
        _walk[lines, tiles, splits](
            q, k, lse.contiguous(), found,
            *q.stride()[:3], *k.stride()[:3],
            heads, length, entries, softmax.scale, softmax.softcap,
            CAUSAL=causal, HIGHEST=highest,
            GROUP=heads // kv_heads, DIM=dim, WIDE=wide, TILE=tile, STEP=step, OPERAND=operand(k),
            num_warps=4, num_stages=2,
        )  # fmt: skip
    if highest:
        return found.amax(0).exp2_()
    return found[0] if splits == 1 else found.sum(0)


def splits_for(programs: int, steps: int, device: torch.device) -> int:
    """Into how many parts to split each program's steps, to keep every processor busy."""
    wanted = processors(device) * PROGRAMS_PER_PROCESSOR // programs
    return max(1, min(wanted, -(-steps // LEAST_STEPS)))


@triton.jit(do_not_specialize=["heads", "length", "entries"])
def _walk(
    queries, keys, lses, found,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    heads, length, entries, scale, softcap,
    CAUSAL: tl.constexpr, HIGHEST: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """One split of one tile of keys: probabilities lie as `(TILE, STEP)`, a query a column."""
    LOG2E: tl.constexpr = 1.4426950408889634
    line = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    split, splits = tl.program_id(2), tl.num_programs(2)
    batch, head = line // heads, line % heads
    keys += batch * k_batch + head // GROUP * k_head + first.to(tl.int64) * k_row
    queries += batch * q_batch + head * q_head
    lses += line * length

    own = tl.arange(0, TILE)
    rows = tl.arange(0, STEP)
    channels = tl.arange(0, WIDE)
    inside = channels < DIM
    key = keys + own[:, None] * k_row + channels[None, :]
    there = (first + own < entries)[:, None] & inside[None, :]
    key = tl.load(key, mask=there, other=0.0).to(OPERAND)

    # The first query that sees an entry of the tile.
    start = 0
    if CAUSAL:
        start = tl.maximum(0, first + length - entries) // STEP * STEP
    seen_from = first + own + length - entries
    part = tl.cdiv(tl.cdiv(length - start, STEP), splits) * STEP
    start += split * part
    result = tl.full((TILE,), -float("inf") if HIGHEST else 0.0, tl.float32)
    for at in range(start, tl.minimum(start + part, length), STEP):
        real = at + rows < length
        query = queries + tl.cast(at, tl.int64) * q_row + rows[None, :] * q_row + channels[:, None]
        query = tl.load(query, mask=real[None, :] & inside[:, None], other=0.0).to(OPERAND)
        # Of a query that is not there no probability is left.
        lse = tl.load(lses + at + rows, mask=real, other=float("inf"))
        logit = tl.dot(key, query)
        if softcap is not None:
            bent = tl.exp2(logit * (scale * (2 * LOG2E / softcap)))
            logit = softcap * LOG2E - 2 * softcap * LOG2E / (1 + bent)
        else:
            logit *= scale * LOG2E
        logit -= lse[None, :] * LOG2E
        if CAUSAL:
            logit = tl.where(seen_from[:, None] <= (at + rows)[None, :], logit, -float("inf"))
        if HIGHEST:
            result = tl.maximum(result, tl.max(logit, 1))
        else:
            result += tl.sum(tl.exp2(logit), 1)
    found += (split * tl.num_programs(0) + line) * entries
    tl.store(found + first + own, result, mask=first + own < entries)
