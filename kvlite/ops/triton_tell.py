"""Tokens told to recall in one launch: keys and values go into pinned host memory, signs into a
layer's index, and queries are turned as the index is searched by."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from kvlite.offload.kv.index import Index


def tell(
    index: "Index",
    rotation: Tensor,
    keys: Tensor | None,
    place: int | Tensor,
    host: tuple[Tensor, Tensor, Tensor] | None = None,
    queries: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor | None:
    """Put tokens in their places, and turn queries.

    Args:
        rotation: `(dim, dim)` float32, of keys and queries that are balanced.
        keys: `(batch, kv heads, n, dim)`, a key's channels together; or None for queries alone.
        place: of the first token, in the index and in host memory: a number, or `(1,)` int64 on the
            device.
        host: the values, as `keys`; and keys and values `(batch, kv heads, places, dim)` in pinned
            memory, of the same dtype, that both are written to.
        queries: `(batch, kv heads, rows, dim)`; a row's channels lie together.
        scale: what they are multiplied by.

    Returns:
        The queries turned, `(batch, kv heads, rows, dim)` float32, if there are any.
    """
    batch, heads, capacity, width = index.signs.shape
    dim, turned = rotation.shape[0], None
    values, to_keys, to_values = (None, None, None) if host is None else host
    if queries is not None:
        turned = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
    rows, count = (0 if each is None else each.shape[2] for each in (queries, keys))
    with torch.cuda.device_of(rotation):
        _tell[rows + count, heads, batch](
            keys, values, to_keys, to_values, queries, turned, index.mean, index.balance, rotation,
            index.signs, index.sizes, place, scale, capacity,
            *_steps(keys, 3), *_steps(values, 3), *_steps(to_keys, 2), *_steps(queries, 3),
            ON_DEVICE=isinstance(place, Tensor), ROWS=rows, DIM=dim,
            ALL=triton.next_power_of_2(dim), WIDTH=width, WIDE=triton.next_power_of_2(width),
            num_warps=4,
        )  # fmt: skip
    return turned


def _steps(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()[:count]


@triton.jit(do_not_specialize=["place", "capacity"])
def _tell(
    keys, values, to_keys, to_values, queries, turned, mean, balance, rotation, signs, sizes, place,
    scale, capacity,
    k_batch, k_head, k_row, v_batch, v_head, v_row, t_batch, t_head, q_batch, q_head, q_row,
    ON_DEVICE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, ALL: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row of one KV head's queries, or behind them a key and its value. Channels are turned as
    they lie in bytes of signs: one bit of each byte after the other."""
    row = tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = batch * tl.num_programs(1) + head
    every = tl.arange(0, ALL)
    held = every < DIM
    inside = tl.arange(0, WIDE)
    balanced = tl.load(balance + line * DIM + every, mask=held, other=1.0)
    if queries is not None:  # noqa: SIM102 - that is known when it is compiled
        if row < ROWS:
            query = queries + batch * q_batch + head * q_head + row * q_row + every
            query = tl.load(query, mask=held, other=0.0).to(tl.float32) * scale / balanced
            for plane in tl.static_range(8):
                channels = plane * WIDTH + inside
                there = (inside < WIDTH) & (channels < DIM)
                part = _turned(query, rotation, every, held, channels, there, DIM)
                tl.store(turned + (line * ROWS + row) * DIM + channels, part, mask=there)
    if keys is not None:  # noqa: SIM102
        if row >= ROWS:
            token = (row - ROWS).to(tl.int64)
            at = token + (tl.load(place) if ON_DEVICE else place)
            key = keys + batch * k_batch + head * k_head + token * k_row + every
            key = tl.load(key, mask=held, other=0.0)
            if to_keys is not None:
                to = batch * t_batch + head * t_head + at * DIM + every
                value = values + batch * v_batch + head * v_head + token * v_row + every
                tl.store(to_keys + to, key, mask=held)
                tl.store(to_values + to, tl.load(value, mask=held), mask=held)
            key = key.to(tl.float32) - tl.load(mean + line * DIM + every, mask=held, other=0.0)
            key *= balanced
            packed = tl.zeros((WIDE,), tl.int32)
            size = 0.0
            for plane in tl.static_range(8):
                channels = plane * WIDTH + inside
                there = (inside < WIDTH) & (channels < DIM)
                part = _turned(key, rotation, every, held, channels, there, DIM)
                packed |= ((part > 0) & there).to(tl.int32) << plane
                size += tl.sum(tl.where(there, tl.abs(part), 0.0), 0)
            own = line * capacity + at
            tl.store(signs + own * WIDTH + inside, packed.to(tl.uint8), mask=inside < WIDTH)
            tl.store(sizes + own, size / DIM)


@triton.jit
def _turned(vector, rotation, every, held, channels, there, DIM: tl.constexpr):
    turn = rotation + every[:, None] * DIM + channels[None, :]
    turn = tl.load(turn, mask=held[:, None] & there[None, :], other=0.0)
    return tl.sum(vector[:, None] * turn, 0)
