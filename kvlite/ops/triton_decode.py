"""Decode attention over quantized entries on a CUDA device, in one pass over their codes.

Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): the entries of a KV head are split among
programs, each keeps a running softmax over its own, and a second kernel merges what they found.
Codes become numbers in registers, and nothing is restored in memory. Products are formed from whole
steps; a group's scale and zero come in afterwards.

Whole steps are exact in bfloat16. What they are multiplied by is the sum of two of its numbers, so
a product on tensor cores is good to 17 bits.
"""

from math import gcd
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlite.ops.device import processors

if TYPE_CHECKING:
    from kvlite.cache.quantization.hadamard import Hadamard

TILE = 64
PROGRAMS_PER_PROCESSOR = 3
LEAST_TILES = 4
MERGED_AT_ONCE = 16


def attend_quantized(
    queries: Tensor,
    keys: "Hadamard",
    values: "Hadamard",
    hadamard: Tensor,
    shift: Tensor,
    softcap: float | None,
    *,
    count: Tensor | None = None,
    logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a few rows over the quantized entries of their KV head.

    What runs depends on shapes alone and nothing is read back, so a CUDA graph can hold it.

    Args:
        queries: `(batch, kv heads, rows, dim)` float32, the query heads of a KV head, multiplied by
            the softmax scale.
        keys, values: `(batch, kv heads, n)` entries, each rounded by itself; bits and groups may
            differ.
        hadamard: `(dim, dim)` float32, what vectors were rotated by before they were rounded.
        shift: `(batch, kv heads, rows)` float32, added to every logit of a row: its product with
            the mean that keys were centered by.
        softcap: bends the shifted logits to softcap * tanh(logit / softcap).
        count: how many of the n there are, `(1,)` on the device; None if all.
        logits: `(batch, kv heads, rows, n)` float32, filled with the logits as the softmax sees
            them.

    Returns:
        output `(batch, kv heads, rows, dim)` float32 and natural-log lse `(batch, kv heads, rows)`
        float32; 0 and -inf for a head without entries.
    """
    batch, heads, rows, dim = queries.shape
    turned = (queries @ hadamard).contiguous()
    splits = splits_for(batch * heads, keys.count, queries.device)
    outs = queries.new_empty(batch, heads, splits, rows, dim)
    lses = queries.new_empty(batch, heads, splits, rows)
    out, lse = torch.empty_like(turned), queries.new_empty(batch, heads, rows)
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(queries):
        _attend_split[batch * heads, splits](
            turned, shift.contiguous(),
            *keys.tensors, *values.tensors,
            logits, outs, lses,
            *_steps_between(keys), *_steps_between(values),
            *((0, 0, 0) if logits is None else logits.stride()[:3]),
            keys.count if count is None else count, heads, softcap,
            COUNTED=count is not None, ROWS=rows, LANES=max(8, 1 << (rows - 1).bit_length()),
            DIM=dim, TILE=TILE, K_BITS=keys.bits, K_GROUP=keys.group, K_CHUNK=_chunk(keys),
            V_BITS=values.bits, V_GROUP=values.group, V_CHUNK=_chunk(values),
            # Triton's interpreter on a CPU multiplies no bfloat16.
            OPERAND=tl.bfloat16 if queries.is_cuda else tl.float32,
            num_warps=4, num_stages=_stages(keys.bits + values.bits, logits is not None),
            # As many of a thread's registers as let three programs share a processor.
            maxnreg=168 if dim <= 128 else None,
        )  # fmt: skip
        merge_splits[batch * heads * rows,](
            outs, lses, out, lse, splits,
            ROWS=rows, DIM=dim, WIDE=1 << (dim - 1).bit_length(), BLOCK=MERGED_AT_ONCE,
        )  # fmt: skip
    return out @ hadamard, lse


def splits_for(heads: int, count: int, device: torch.device) -> int:
    """Into how many parts to split each head's entries, to keep every processor busy."""
    wanted = -(-processors(device) * PROGRAMS_PER_PROCESSOR // heads)
    return max(1, min(wanted, -(-count // (TILE * LEAST_TILES))))


def _stages(bits: int, remembers: bool) -> int:
    """How many tiles are on their way at once: as many as a thread has registers for, which
    `tests/cuda` counts."""
    if bits <= 8:
        return 3
    return 1 if remembers else 2


def _chunk(entries: "Hadamard") -> int:
    # Channels that lie in one plane of the codes and in one group.
    return gcd(entries.codes.shape[3], entries.group)


def _steps_between(entries: "Hadamard") -> tuple[int, ...]:
    return *entries.codes.stride()[:3], *entries.scales.stride()[:3]


@triton.jit
def _attend_split(
    queries, shift, k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, logits, outs,
    lses,
    k_batch, k_head, k_entry, ks_batch, ks_head, ks_group, v_batch, v_head, v_entry,
    vs_batch, vs_head, vs_group, l_batch, l_head, l_row,
    given, heads, softcap,
    COUNTED: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_CHUNK: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_CHUNK: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """One split of one KV head: its output `(rows, dim)` and lse. Logits lie as `(TILE, LANES)`,
    a row a column; output as `(channels, LANES)`, chunk by chunk."""
    V_CHUNKS: tl.constexpr = DIM // V_CHUNK
    K_GROUPS: tl.constexpr = DIM // K_GROUP
    V_GROUPS: tl.constexpr = DIM // V_GROUP
    K_ROW: tl.constexpr = DIM * K_BITS // 8 // K_CHUNK
    V_ROW: tl.constexpr = DIM * V_BITS // 8 // V_CHUNK
    line = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch, head = line // heads, line % heads
    k_codes += batch * k_batch + head * k_head
    v_codes += batch * v_batch + head * v_head
    k_scales += batch * ks_batch + head * ks_head
    k_zeros += batch * ks_batch + head * ks_head
    v_scales += batch * vs_batch + head * vs_head
    v_zeros += batch * vs_batch + head * vs_head
    queries += line * ROWS * DIM
    if logits is not None:
        logits += batch * l_batch + head * l_head

    count = tl.load(given).to(tl.int32) if COUNTED else given
    part = tl.cdiv(tl.cdiv(count, TILE), tl.num_programs(1)) * TILE
    start = split * part
    stop = tl.minimum(start + part, count)

    lanes = tl.arange(0, LANES)
    real = lanes < ROWS
    moved = tl.load(shift + line * ROWS + lanes, mask=real, other=0.0)
    near, rest, sums = (), (), ()
    for g in tl.static_range(K_GROUPS):
        asked_for = tl.zeros((LANES,), tl.float32)
        for c in tl.static_range(g * K_GROUP // K_CHUNK, (g + 1) * K_GROUP // K_CHUNK):
            asked = _queries_of(queries, lanes, real, c, K_CHUNK, DIM)
            asked_for += tl.sum(asked, 0)
            halves = _halves(asked * (1.0 / (1 << (c // K_ROW * K_BITS))), OPERAND)
            near += (halves[0],)
            rest += (halves[1],)
        sums += (asked_for,)

    top = tl.full((LANES,), -float("inf"), tl.float32)
    mass = tl.zeros((TILE, LANES), tl.float32)
    steps, offsets = (), ()
    for _c in tl.static_range(V_CHUNKS):
        steps += (tl.zeros((_width(V_CHUNK), LANES), tl.float32),)
    for _g in tl.static_range(V_GROUPS):
        offsets += (tl.zeros((TILE, LANES), tl.float32),)

    for at in range(start, stop, TILE):
        entries = at + tl.arange(0, TILE)
        held = entries < stop
        k_bytes, v_bytes = (), ()
        for b in tl.static_range(K_ROW):
            k_bytes += (_bytes_of(k_codes, k_entry, entries, held, b, K_CHUNK),)
        for b in tl.static_range(V_ROW):
            v_bytes += (_bytes_of(v_codes, v_entry, entries, held, b, V_CHUNK),)

        # All that a tile needs is asked for before the first wait.
        ks, kz, vs, vz = (), (), (), ()
        for g in tl.static_range(K_GROUPS):
            ks += (tl.load(k_scales + g * ks_group + entries, mask=held, other=0.0),)
            kz += (tl.load(k_zeros + g * ks_group + entries, mask=held, other=0.0),)
        for g in tl.static_range(V_GROUPS):
            vs += (tl.load(v_scales + g * vs_group + entries, mask=held, other=0.0),)
            vz += (tl.load(v_zeros + g * vs_group + entries, mask=held, other=0.0),)

        logit = tl.zeros((TILE, LANES), tl.float32) + moved[None, :]
        for g in tl.static_range(K_GROUPS):
            dot = tl.zeros((TILE, LANES), tl.float32)
            for c in tl.static_range(g * K_GROUP // K_CHUNK, (g + 1) * K_GROUP // K_CHUNK):
                k_steps = _plane(k_bytes[c % K_ROW], c // K_ROW, K_BITS, OPERAND)
                dot = tl.dot(k_steps, near[c], dot)
                dot = tl.dot(k_steps, rest[c], dot)
            logit += dot * ks[g].to(tl.float32)[:, None]
            logit += kz[g].to(tl.float32)[:, None] * sums[g][None, :]
        if softcap is not None:
            logit = softcap - 2 * softcap / (1 + tl.exp(logit * (2 / softcap)))
        logit = tl.where(held[:, None], logit, -float("inf"))
        if logits is not None:
            places = logits + lanes[None, :] * l_row + entries[:, None]
            tl.store(places, logit, mask=held[:, None] & real[None, :])

        # A tile has at least one entry, so the maximum is finite.
        new_top = tl.maximum(top, tl.max(logit, 0))
        keep = tl.exp(top - new_top)[None, :]
        top = new_top
        weight = tl.exp(logit - top[None, :])
        mass = mass * keep + weight
        new_steps, new_offsets = (), ()
        for g in tl.static_range(V_GROUPS):
            new_offsets += (offsets[g] * keep + weight * vz[g].to(tl.float32)[:, None],)
            high, low = _halves(weight * vs[g].to(tl.float32)[:, None], OPERAND)
            for c in tl.static_range(g * V_GROUP // V_CHUNK, (g + 1) * V_GROUP // V_CHUNK):
                v_steps = tl.trans(_plane(v_bytes[c % V_ROW], c // V_ROW, V_BITS, OPERAND))
                step = tl.dot(v_steps, high, steps[c] * keep)
                new_steps += (tl.dot(v_steps, low, step),)
        steps, offsets = new_steps, new_offsets

    total = tl.sum(mass, 0)
    # 1 stands for the weight of no entries, the -inf of their lse comes from `top`.
    total = tl.where(total > 0, total, 1.0)
    line = (line * tl.num_programs(1) + split) * ROWS
    tl.store(lses + line + lanes, top + tl.log(total), mask=real)
    for g in tl.static_range(V_GROUPS):
        offset = tl.sum(offsets[g], 0)
        for c in tl.static_range(g * V_GROUP // V_CHUNK, (g + 1) * V_GROUP // V_CHUNK):
            inside = tl.arange(0, _width(V_CHUNK))
            own = steps[c] * (1.0 / (1 << (c // V_ROW * V_BITS))) + offset[None, :]
            places = outs + (line + lanes[None, :]) * DIM + c * V_CHUNK + inside[:, None]
            tl.store(places, own / total[None, :], mask=(inside < V_CHUNK)[:, None] & real[None, :])


@triton.jit
def merge_splits(
    outs, lses, out, lse, splits,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of one KV head, from all splits."""
    row = tl.program_id(0)
    first = (row // ROWS).to(tl.int64) * splits * ROWS + row % ROWS
    channels = tl.arange(0, WIDE)
    top = -float("inf")
    for at in range(0, splits, BLOCK):
        each = at + tl.arange(0, BLOCK)
        own = tl.load(lses + first + each * ROWS, mask=each < splits, other=-float("inf"))
        top = tl.maximum(top, tl.max(own, 0))
    base = tl.where(top == -float("inf"), 0.0, top)
    total = 0.0
    sums = tl.zeros((WIDE,), tl.float32)
    for at in range(0, splits, BLOCK):
        each = at + tl.arange(0, BLOCK)
        own = tl.load(lses + first + each * ROWS, mask=each < splits, other=-float("inf"))
        weight = tl.exp(own - base)
        total += tl.sum(weight, 0)
        places = outs + (first + each * ROWS)[:, None] * DIM + channels[None, :]
        held = (each < splits)[:, None] & (channels < DIM)[None, :]
        sums += tl.sum(tl.load(places, mask=held, other=0.0) * weight[:, None], 0)
    total = tl.where(total > 0, total, 1.0)
    tl.store(out + row.to(tl.int64) * DIM + channels, sums / total, mask=channels < DIM)
    tl.store(lse + row, top + tl.log(total))


@triton.constexpr_function
def _width(chunk):
    """Channels of a tile that a chunk is padded to."""
    return max(16, triton.next_power_of_2(chunk))


@triton.jit
def _queries_of(queries, lanes, real, c, CHUNK: tl.constexpr, DIM: tl.constexpr):
    inside = tl.arange(0, _width(CHUNK))
    held = (inside < CHUNK)[:, None] & real[None, :]
    places = queries + lanes[None, :] * DIM + c * CHUNK + inside[:, None]
    return tl.load(places, mask=held, other=0.0)


@triton.jit
def _halves(numbers, OPERAND: tl.constexpr):
    """Two bfloat16 numbers each, whose sum is within 2^-16 of it."""
    high = numbers.to(tl.bfloat16)
    low = (numbers - high.to(tl.float32)).to(tl.bfloat16)
    return high.to(OPERAND), low.to(OPERAND)


@triton.jit
def _bytes_of(codes, stride, entries, held, b, CHUNK: tl.constexpr):
    inside = tl.arange(0, _width(CHUNK))
    places = codes + entries[:, None] * stride + b * CHUNK + inside[None, :]
    return tl.load(places, mask=held[:, None] & (inside < CHUNK)[None, :], other=0)


@triton.jit
def _plane(packed, plane: tl.constexpr, BITS: tl.constexpr, OPERAND: tl.constexpr):
    """The codes of one plane, times 2 to the power of plane * bits: they are not shifted."""
    return (packed & (((1 << BITS) - 1) << (plane * BITS))).to(OPERAND)
