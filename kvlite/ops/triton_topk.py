"""A layer's index on a CUDA device, searched in one pass over its signs.

The entries of a KV head are split among programs. Each forms the logits of its own and the sum of
their exponentials; a second kernel merges the sums, as in Flash-Decoding (Dao, Haziza, Massa and
Sizov, 2023), and averages probabilities over a head's rows. Signs become numbers in registers, and
are never unpacked in memory.

Bits in their places are exact in float16. Queries are brought to a known size by a power of two and
split into the sum of two such numbers, so a product on tensor cores is good to 22 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
# Tiles that a program takes, at most, and programs that keep a device busy.
MOST_TILES = 8
PROGRAMS = 512
MERGED_AT_ONCE = 128


def search(
    turned: Tensor, signs: Tensor, sizes: Tensor, used: int | Tensor, entries: int
) -> Tensor:
    """Roughly the attention that every entry gets, the mean of a KV head's rows.

    What runs depends on shapes alone and nothing is read back.

    Args:
        turned: `(batch, kv heads, rows, dim)` float32, queries as `Index.turned` makes them.
        signs: `(batch, kv heads, capacity, bytes)` uint8, as `Index` has them.
        sizes: `(batch, kv heads, capacity)` float32.
        used: how many entries are in the index, at least one, of `entries`: a number, or `(1,)`
            int64 on the device.

    Returns:
        `(batch, kv heads, entries)` float32, 0 for those that are not in the index.
    """
    batch, heads, rows, dim = turned.shape
    capacity, width = signs.shape[2:]
    most = capacity if isinstance(used, Tensor) else used
    lines = batch * heads
    part = TILE * _tiles(lines * -(-most // TILE))
    parts = -(-most // part)
    logits = turned.new_empty(lines, rows, most)
    lses = turned.new_empty(lines, rows, parts)
    scores = turned.new_empty(batch, heads, entries)
    # Triton launches on the current device, which need not be the one of this layer.
    with torch.cuda.device_of(turned):
        _logits_of[lines, parts](
            turned.contiguous(), signs, sizes, logits, lses, capacity, most, used,
            ON_DEVICE=isinstance(used, Tensor), ROWS=rows,
            LANES=max(8, 1 << (rows - 1).bit_length()), DIM=dim, WIDTH=width,
            WIDE=max(16, 1 << (width - 1).bit_length()), TILE=TILE, PART=part,
            num_warps=4,
        )  # fmt: skip
        _averaged[lines, -(-entries // part)](
            logits, lses, scores, parts, most, used, entries,
            ON_DEVICE=isinstance(used, Tensor), ROWS=rows, BLOCK=MERGED_AT_ONCE, PART=part,
            num_warps=4,
        )  # fmt: skip
    return scores


def _tiles(tiles: int) -> int:
    """A power of two: how many of all tiles a program takes."""
    return min(MOST_TILES, 1 << (-(-tiles // PROGRAMS) - 1).bit_length())


@triton.jit(do_not_specialize=["capacity", "most", "used"])
def _logits_of(
    turned, signs, sizes, logits, lses, capacity, most, used,
    ON_DEVICE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One part of one KV head: its logits `(rows, entries)`, and their lse. They are formed as
    `(TILE, LANES)`, a row a column."""
    line = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    turned += line * ROWS * DIM
    signs += line * capacity * WIDTH
    sizes += line * capacity
    logits += line * ROWS * most
    known = tl.load(used).to(tl.int32) if ON_DEVICE else used
    lanes = tl.arange(0, LANES)
    real = lanes < ROWS
    inside = tl.arange(0, WIDE)

    largest = tl.zeros((LANES,), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for plane in tl.static_range(8):
        asked = _asked(turned, lanes, real, inside, plane, DIM, WIDTH)
        largest = tl.maximum(largest, tl.max(tl.abs(asked), 0))
        total += tl.sum(asked, 0)
    # Without what follows its exponent a number is a power of two; the least keeps zeros finite.
    exponent = tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    scale = 1024 / exponent.to(tl.float32, bitcast=True)
    near, rest = (), ()
    for plane in tl.static_range(8):
        # A bit is left in its place in the byte: its step is smaller.
        asked = _asked(turned, lanes, real, inside, plane, DIM, WIDTH)
        asked = asked * (scale * (1.0 / (1 << plane)))[None, :]
        high = asked.to(tl.float16)
        near += (high,)
        rest += ((asked - high.to(tl.float32)).to(tl.float16),)

    top = tl.full((LANES,), -float("inf"), tl.float32)
    mass = tl.zeros((LANES,), tl.float32)
    for at in range(part * PART, tl.minimum((part + 1) * PART, known), TILE):
        entries = at + tl.arange(0, TILE)
        held = entries < known
        places = signs + entries.to(tl.int64)[:, None] * WIDTH + inside[None, :]
        packed = tl.load(places, mask=held[:, None] & (inside < WIDTH)[None, :], other=0)
        size = tl.load(sizes + entries, mask=held, other=0.0)
        dot = tl.zeros((TILE, LANES), tl.float32)
        for plane in tl.static_range(8):
            bits = (packed & (1 << plane)).to(tl.float16)
            dot = tl.dot(bits, near[plane], dot)
            dot = tl.dot(bits, rest[plane], dot)
        logit = (2 * (dot / scale[None, :]) - total[None, :]) * size[:, None]
        places = logits + lanes.to(tl.int64)[None, :] * most + entries[:, None]
        tl.store(places, logit, mask=held[:, None] & real[None, :])
        logit = tl.where(held[:, None], logit, -float("inf"))
        # A tile has at least one entry, so the maximum is finite.
        new_top = tl.maximum(top, tl.max(logit, 0))
        mass = mass * tl.exp(top - new_top) + tl.sum(tl.exp(logit - new_top[None, :]), 0)
        top = new_top
    parts = tl.num_programs(1)
    tl.store(lses + (line * ROWS + lanes) * parts + part, top + tl.log(mass), mask=real)


@triton.jit
def _asked(
    turned, lanes, real, inside, plane: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """What meets one bit of each byte: `(bytes, LANES)` of the queries' channels."""
    channels = plane * WIDTH + inside
    held = ((inside < WIDTH) & (channels < DIM))[:, None] & real[None, :]
    return tl.load(turned + lanes[None, :] * DIM + channels[:, None], mask=held, other=0.0)


@triton.jit(do_not_specialize=["parts", "most", "used", "entries"])
def _averaged(
    logits, lses, scores, parts, most, used, entries,
    ON_DEVICE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Probabilities of some entries of one KV head, the mean of its rows."""
    line = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * PART + tl.arange(0, PART)
    known = places < (tl.load(used).to(tl.int32) if ON_DEVICE else used)
    score = tl.zeros((PART,), tl.float32)
    for row in range(ROWS):
        own = lses + (line * ROWS + row) * parts
        top = -float("inf")
        for at in range(0, parts, BLOCK):
            each = at + tl.arange(0, BLOCK)
            found = tl.load(own + each, mask=each < parts, other=-float("inf"))
            top = tl.maximum(top, tl.max(found, 0))
        whole = 0.0
        for at in range(0, parts, BLOCK):
            each = at + tl.arange(0, BLOCK)
            found = tl.load(own + each, mask=each < parts, other=-float("inf"))
            whole += tl.sum(tl.exp(found - top), 0)
        logit = tl.load(
            logits + (line * ROWS + row) * most + places, mask=known, other=-float("inf")
        )
        score += tl.exp(logit - top) / whole
    tl.store(scores + line * entries + places, score / ROWS, mask=places < entries)
