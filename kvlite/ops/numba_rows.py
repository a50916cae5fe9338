"""Tokens of one or several conversations on a CPU, compiled by numba: an entry is written, what the
token wants is fetched, and it attends, in one call a layer for all of them. Threads share the KV
heads of the conversations: in each, tokens of one conversation come one after the other.

What a conversation holds lies where it lies: loops are given addresses, a line of whole numbers for
each token, whose columns are named here.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import carray, types

from kvlite.ops.numba_attention import attend_head
from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_llvm import bytes_at, floats_at, halves_at, places_at, words_at
from kvlite.ops.numba_recall import fill_head
from kvlite.ops.numba_search import add, search
from kvlite.ops.numba_threads import board, reading, share, work

Array = np.ndarray
# Of what is held, and from `SOURCE` on of the host store: where exact keys, values and positions of
# all KV heads are, how many slots for them a head has, how many entries, this token's included.
KEYS, VALUES, POSITIONS, SLOTS, USED = range(5)
# Of those that are quantized: how many, for how many a head has storage, behind how many exact
# ones; bits of keys and values, groups of these; where `Packed` has its tensors.
PACKED, CAPACITY, START, BITS, VALUE_BITS, GROUPS, VALUE_GROUPS, TENSORS = range(5, 13)
SOURCE = TENSORS + 8
# Where the index has signs, sizes, the mean and the balance; slots a head; keys in it.
SIGNS, SIZES, MEAN, BALANCE, INDEX_SLOTS, INDEXED = range(2 * SOURCE, 2 * SOURCE + 6)
# The token's position, and how many entries it wants of each KV head, 0 if it fetches none.
POSITION, COUNT = INDEXED + 1, INDEXED + 2
# Channels of keys that are worth other threads' looking for them.
WORTH = 1 << 14
NO_WEIGHTS = np.empty((0, 0, 0, 0), np.float32)


def attend(
    q: Array,
    k: Array,
    v: Array,
    lines: list[list[int]],
    softcap: float | None,
    sinks: Array | None,
    recalling: tuple[int, int, int, int],
    weights: Array = NO_WEIGHTS,
) -> tuple[Array, Array]:
    """Attention of one token a conversation, whose entry goes to the last filled slot of what is
    held and of its host store. Nothing is counted, so that it can be done again.

    Args:
        q: `(tokens, KV heads, rows, dim)` float32, scaled.
        k, v: `(tokens, KV heads, dim)` float32; `(tokens, KV heads, 0)` of entries that are there.
        lines: of each token all columns; where there is no host store, its columns and the index's
            are 0.
        softcap, sinks: as in `kvlite.ops.softmax`; sinks `(KV heads, rows)` float32.
        recalling: after how many keys the index takes them; how many candidates for one that is
            wanted; how many of the first and of the recent entries are always wanted.
        weights: `(tokens, KV heads, rows, entries)` float32, into which probabilities go; or none.

    Returns:
        output in the shape of q; and how many entries came, `(tokens,)` int64.
    """
    out, num_fetched = np.empty_like(q), np.zeros(k.shape[:2], np.int64)
    if sinks is None:
        sinks = no_sinks(*q.shape[1:3])
    table, bent = np.array(lines, np.int64), float(softcap or 0)
    held = np.empty((0, 0, 0), np.int32)
    given = Given(q, k, v, table, bent, sinks, recalling, out, num_fetched, held, 1, weights)
    share_heads(board(), attending(table), given)
    return out, num_fetched.sum(1)


def attending(table: Array) -> int:
    """The address of what attends with one head, for `share_heads`, where lines are in a table."""
    has: Array = np.any(table.reshape(-1, table.shape[-1]), 0)
    return WORKS[bool(has[SOURCE]), bool(has[PACKED] or has[SOURCE + PACKED])]()


@cache
def no_sinks(heads: int, rows: int) -> Array:
    """Sinks that take no share."""
    return np.full((heads, rows), -np.inf, np.float32)


class Given(NamedTuple):
    """What `attend` has and returns.

    Attributes:
        table: the lines.
        num_fetched: how many entries came, `(tokens, KV heads)`.
        held: what each head holds after each token, by position, `(tokens, KV heads, slots)`; or
            none.
        row: how many tokens in a row are of one conversation.
        weights: probabilities, as of `attend`; or none.
    """

    q: Array
    k: Array
    v: Array
    table: Array
    softcap: float
    sinks: Array
    recalling: tuple[int, int, int, int]
    out: Array
    num_fetched: Array
    held: Array
    row: int
    weights: Array


_real, _count = types.float32, types.int64
_rows, _vectors = _real[:, :, :, ::1], _real[:, :, ::1]
# Of `Given`.
KINDS = (
    *(_rows, _vectors, _vectors, _count[:, ::1], types.float64, _real[:, ::1]),
    *(types.UniTuple(_count, 4), _rows, _count[:, ::1], types.int32[:, :, ::1], _count, _rows),
)
_given = reading(types.NamedTuple(KINDS, Given))


@jitted
def share_heads(board, attend_head, given):
    """Attend with all heads, by all threads of a board."""
    k, most = given.k, 0
    for line in given.table:
        most = max(most, line[USED], line[SOURCE + USED])
    shared = board if most * k.size >= WORTH else board[:0]
    share(shared, attend_head, given, k.shape[0] // given.row * k.shape[1])


@jitted
def _entries(line, first, head, dim):
    slots = line[first + SLOTS]
    before, shape = 4 * head * slots, (1, slots, dim)
    keys = carray(floats_at(line[first + KEYS] + before * dim), shape)
    values = carray(floats_at(line[first + VALUES] + before * dim), shape)
    return keys, values, carray(places_at(line[first + POSITIONS] + before), (1, slots))


@jitted
def _segment(line, first, head, dim):
    room, bits, value_bits = line[first + CAPACITY], line[first + BITS], line[first + VALUE_BITS]
    keys = _packed(line, first + TENSORS, head, room, dim * bits // 8, line[first + GROUPS])
    width, groups = dim * value_bits // 8, line[first + VALUE_GROUPS]
    values = _packed(line, first + TENSORS + 3, head, room, width, groups)
    positions = carray(places_at(line[first + TENSORS + 6] + 4 * head * room), (1, room))
    mean = carray(floats_at(line[first + TENSORS + 7] + 4 * head * dim), (1, dim))
    return (*keys, *values, positions, mean, line[first + PACKED])


@jitted
def _packed(line, column, head, count, width, groups):
    codes = carray(bytes_at(line[column] + head * count * width), (1, count, width))
    before, shape = 2 * head * groups * count, (1, groups, count)
    scales = carray(halves_at(line[column + 1] + before), shape)
    return codes, scales, carray(halves_at(line[column + 2] + before), shape)


@jitted
def _write(line, first, head, k, v):
    keys, values, positions = _entries(line, first, head, k.size)
    place = line[first + USED] - line[first + PACKED] - 1
    for d in range(k.size):
        keys[0, place, d], values[0, place, d] = k[d], v[d]
    positions[0, place] = line[POSITION]


def _attending(fetches: bool, packs: bool) -> Callable[[], int]:
    """What compiles `attend` with one head of one conversation: whether what is wanted is fetched,
    and whether entries may be quantized. What does more takes longer to compile."""

    def attend_head(address, part):
        given = _given(address)
        heads = given.k.shape[1]
        first, head = part // heads * given.row, part % heads
        for token in range(first, first + given.row):
            _enter(given, token, head)
            if packs:
                line, dim = given.table[token], given.q.shape[3]
                packed, far = _segment(line, 0, head, dim), _segment(line, SOURCE, head, dim)
            else:
                packed, far = None, None
            if fetches:
                _fetch(given, token, head, packed, far)
            _attend(given, token, head, packed)
            if fetches:
                _remember(given, token, head)

    # numba finds what it compiled by this name.
    attend_head.__qualname__ += f"_{fetches}_{packs}"
    return work(attend_head)


WORKS = {
    (fetches, packs): _attending(fetches, packs)
    for fetches in (False, True)
    for packs in (False, True)
}


@jitted
def _enter(given, token, at):
    line, key, value = given.table[token], given.k[token, at], given.v[token, at]
    if key.size:
        _write(line, 0, at, key, value)
    if line[SOURCE]:
        _tell(line, at, key, value, given.recalling[0])


@jitted
def _attend(given, token, at, packed):
    line, queries = given.table[token], given.q[token, at]
    own = _entries(line, 0, at, queries.shape[1])[:2]
    if given.weights.size:
        weights = given.weights[token, at]
    else:
        weights = np.empty((len(queries), line[USED]), np.float32)
    sinks, made = given.sinks[at : at + 1], given.out[token, at]
    attend_head(queries, 0, own, packed, _sizes(line, 0), given.softcap, sinks, made, weights)


@jitted
def _fetch(given, token, at, packed, far):
    line, queries, recalling = given.table[token], given.q[token, at], given.recalling
    at_once, among, first, recent = recalling
    if line[COUNT]:
        signs, sizes, _, balance = _index(line, at, queries.shape[1])
        known, asked = _indexed(line, at_once), queries.reshape(1, *queries.shape)
        rough = search(asked, balance, signs, sizes, known, line[SOURCE + USED])[0]
        own = _entries(line, 0, at, queries.shape[1])
        source = _entries(line, SOURCE, at, queries.shape[1]), far, _sizes(line, SOURCE)
        limits = line[COUNT], among * line[COUNT], first, recent
        held = own, packed, _sizes(line, 0)
        leaving = fill_head(queries, rough, *source, 0, *held, 0, line[USED], limits)
        given.num_fetched[token, at] += leaving.size


@jitted
def _sizes(line, first):
    return line[first + START], line[first + BITS], line[first + VALUE_BITS]


@jitted
def _remember(given, token, at):
    held = given.held
    if not held.size:
        return
    line, dim = given.table[token], given.k.shape[2]
    used, packed, start = line[USED], line[PACKED], line[START]
    _, _, own = _entries(line, 0, at, dim)
    middle = carray(places_at(line[TENSORS + 6] + 4 * at * line[CAPACITY]), (max(packed, 1),))
    for slot in range(used):
        if packed and start <= slot < start + packed:
            held[token, at, slot] = middle[slot - start]
        else:
            held[token, at, slot] = own[0, slot - (packed if slot >= start else 0)]


@jitted
def _index(line, head, dim):
    slots, words, before = line[INDEX_SLOTS], -(-dim // 64), 4 * head * dim
    signs = carray(words_at(line[SIGNS] + 8 * head * slots * words), (1, slots, words))
    sizes = carray(floats_at(line[SIZES] + 4 * head * slots), (1, slots))
    mean = carray(floats_at(line[MEAN] + before), (1, dim))
    return signs, sizes, mean, carray(floats_at(line[BALANCE] + before), (1, dim))


@jitted
def _indexed(line, at_once):
    """How many keys the index has with this token: it takes so many at once."""
    read, known = line[SOURCE + USED], line[INDEXED]
    return read if read - known == at_once else known


@jitted
def _tell(line, head, k, v, at_once):
    _write(line, SOURCE, head, k, v)
    read, packed = line[SOURCE + USED], line[SOURCE + PACKED]
    if _indexed(line, at_once) == read:
        signs, sizes, mean, balance = _index(line, head, k.size)
        keys = _entries(line, SOURCE, head, k.size)[0]
        # What the answer adds comes after all that is quantized.
        new = keys[:, line[INDEXED] - packed : read - packed].copy()
        add(new, mean, balance, signs, sizes, line[INDEXED])
