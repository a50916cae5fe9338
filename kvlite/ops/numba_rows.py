"""Tokens of one or several conversations on a CPU, compiled by numba: an entry is written, what the
token wants is fetched, and it attends, in one call a layer for all of them. Threads share the KV
heads of the conversations: in each, tokens of one conversation come one after the other.

What a conversation holds lies where it lies: loops are given addresses, a line of whole numbers for
each token, whose columns are named here.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import carray, types

from kvlite.ops.numba_attention import products_of_held, softmax, weighed
from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_pointers import bytes_at, floats_at, halves_at, places_at, words_at
from kvlite.ops.numba_recall import candidates, exchanged, fill, wanted
from kvlite.ops.numba_search import add, search
from kvlite.ops.numba_threads import board, passing, share, work
from kvlite.ops.numba_vectors import fetch_vector, multiply, weigh

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


def attend(
    q: Array,
    k: Array,
    v: Array,
    lines: list[list[int]],
    softcap: float | None,
    sinks: Array | None,
    recalling: tuple[int, int, int, int],
) -> tuple[Array, Array]:
    """Attention of one token a conversation, whose entry goes to the last filled slot of what is
    held and of its host store. Nothing is counted, so that it can be done again.

    Args:
        q: `(tokens, KV heads, rows, dim)` float32, scaled.
        k, v: `(tokens, KV heads, dim)` float32.
        lines: of each token all columns; where there is no host store, its columns and the index's
            are 0.
        softcap, sinks: as in `kvlite.ops.softmax`; sinks `(KV heads, rows)` float32.
        recalling: after how many keys the index takes them; how many candidates for one that is
            wanted; how many of the first and of the recent entries are always wanted.

    Returns:
        output in the shape of q; and how many entries came, `(tokens,)` int64.
    """
    out, came = np.empty_like(q), np.zeros(k.shape[:2], np.int64)
    if sinks is None:
        sinks = no_sinks(*q.shape[1:3])
    table, bent = np.array(lines, np.int64), float(softcap or 0)
    held = np.empty((0, 0, 0), np.int32)
    given = Given(q, k, v, table, bent, sinks, recalling, out, came, held, 1)
    share_heads(board(), attending(table), given)
    return out, came.sum(1)


def attending(table: Array) -> int:
    """The address of what attends with one head, for `share_heads`, where lines are in a table."""
    has: Array = np.any(table.reshape(-1, table.shape[-1]), 0)
    if has[PACKED] or has[SOURCE + PACKED]:
        return fetch_packed() if has[SOURCE] else attend_packed()
    return fetch_exact() if has[SOURCE] else attend_exact()


@cache
def no_sinks(heads: int, rows: int) -> Array:
    """Sinks that take no share."""
    return np.full((heads, rows), -np.inf, np.float32)


class Given(NamedTuple):
    """What `attend` has and returns.

    Attributes:
        table: the lines.
        came: how many entries came, `(tokens, KV heads)`.
        held: what each head holds after each token, by position, `(tokens, KV heads, slots)`; or
            none.
        row: how many tokens in a row are of one conversation.
    """

    q: Array
    k: Array
    v: Array
    table: Array
    softcap: float
    sinks: Array
    recalling: tuple[int, int, int, int]
    out: Array
    came: Array
    held: Array
    row: int


_real, _count = types.float32, types.int64
_rows, _vectors = _real[:, :, :, ::1], _real[:, :, ::1]
_kinds = (
    *(_rows, _vectors, _vectors, _count[:, ::1], types.float64, _real[:, ::1]),
    *(types.UniTuple(_count, 4), _rows, _count[:, ::1], types.int32[:, :, ::1], _count),
)
_address, _given = passing(types.NamedTuple(_kinds, Given))


@jitted
def share_heads(board, attend_head, given):
    """Attend with all heads, by all threads of a board."""
    k, most = given.k, 0
    for line in given.table:
        most = max(most, line[USED], line[SOURCE + USED])
    shared = board if most * k.size >= WORTH else board[:0]
    share(shared, attend_head, _address(given), k.shape[0] // given.row * k.shape[1])


@jitted
def _entries(line, first, head, dim):
    slots = line[first + SLOTS]
    before, shape = 4 * head * slots, (1, slots, dim)
    keys = carray(floats_at(line[first + KEYS] + before * dim), shape)
    values = carray(floats_at(line[first + VALUES] + before * dim), shape)
    return keys, values, carray(places_at(line[first + POSITIONS] + before), (1, slots))


@jitted
def _whole(line, first, head, dim):
    room, bits, value_bits = line[first + CAPACITY], line[first + BITS], line[first + VALUE_BITS]
    keys = _packed(line, first + TENSORS, head, room, dim * bits // 8, line[first + GROUPS])
    width, groups = dim * value_bits // 8, line[first + VALUE_GROUPS]
    values = _packed(line, first + TENSORS + 3, head, room, width, groups)
    positions = carray(places_at(line[first + TENSORS + 6] + 4 * head * room), (1, room))
    mean = carray(floats_at(line[first + TENSORS + 7] + 4 * head * dim), (1, dim))
    sizes = line[first + START], bits, value_bits, line[first + PACKED]
    return _entries(line, first, head, dim), (*keys, *values, positions, mean), sizes


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


@work
def attend_exact(address, part):
    """As `attend`, with one head of one conversation: all that is held is exact, nothing is
    fetched. What does more takes longer to compile."""
    given = _given(address)
    for token, at in _tokens(given, part):
        _enter(given, token, at)
        _weigh_exact(given, token, at, _multiply_exact(given, token, at))


@work
def fetch_exact(address, part):
    """Likewise, and what is wanted is fetched, all of it exact."""
    given = _given(address)
    for token, at in _tokens(given, part):
        _fetch_exact(given, token, at)
        _remember(given, token, at)


@work
def attend_packed(address, part):
    """Likewise, nothing is fetched, and entries may be quantized."""
    given = _given(address)
    for token, at in _tokens(given, part):
        _enter(given, token, at)
        _attend_packed(given, token, at)


@work
def fetch_packed(address, part):
    """Likewise, what is wanted is fetched, and entries may be quantized."""
    given = _given(address)
    for token, at in _tokens(given, part):
        line = given.table[token]
        if line[PACKED] + line[SOURCE + PACKED] == 0:
            _fetch_exact(given, token, at)
        else:
            _enter(given, token, at)
            if line[COUNT]:
                asked = given.q[token, at : at + 1]
                given.came[token, at] += _fetch_packed(line, at, asked, given.recalling)
            _attend_packed(given, token, at)
        _remember(given, token, at)


@jitted
def _tokens(given, part):
    heads = given.k.shape[1]
    first = part // heads * given.row
    return [(token, part % heads) for token in range(first, first + given.row)]


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
def _enter(given, token, at):
    line, key, value = given.table[token], given.k[token, at], given.v[token, at]
    _write(line, 0, at, key, value)
    if line[SOURCE]:
        _tell(line, at, key, value, given.recalling[0])


@jitted
def _fetch_exact(given, token, at):
    line = given.table[token]
    _enter(given, token, at)
    products = _multiply_exact(given, token, at)
    if line[COUNT]:
        came = _fetch(line, at, given.q[token, at], products, given.recalling)
        given.came[token, at] += came
    _weigh_exact(given, token, at, products)


@jitted
def _multiply_exact(given, token, at):
    q, line = given.q, given.table[token]
    keys, _, _ = _entries(line, 0, at, q.shape[3])
    products = np.empty((q.shape[2], line[USED]), np.float32)
    multiply(q[token, at], keys[0], np.arange(line[USED]), products, 0)
    return products


@jitted
def _weigh_exact(given, token, at, products):
    """Attention by the products, which become probabilities."""
    _, values, _ = _entries(given.table[token], 0, at, given.k.shape[2])
    for row in range(len(products)):
        softmax(products[row], given.softcap, given.sinks[at, row])
    made = given.out[token, at]
    made[:] = 0
    weigh(products, 0, values[0], products.shape[1], made)


@jitted
def _attend_packed(given, token, at):
    line, own = given.table[token], slice(at, at + 1)
    queries, made = given.q[token, own], given.out[token, own]
    entries, packed, sizes = _whole(line, 0, at, given.k.shape[2])
    products = products_of_held(queries, entries[:2], packed, sizes, line[USED])
    weighed(products, entries[:2], packed, sizes, given.softcap, given.sinks[own], made)


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


@jitted
def _rough(line, head, queries, at_once):
    signs, sizes, _, balance = _index(line, head, queries.shape[2])
    return search(queries, balance, signs, sizes, _indexed(line, at_once), line[SOURCE + USED])


@jitted
def _fetch_packed(line, head, queries, recalling):
    at_once, among, first, recent = recalling
    dim, which = queries.shape[2], np.zeros(1, np.int64)
    source, held = _whole(line, SOURCE, head, dim), _whole(line, 0, head, dim)
    rough, none = _rough(line, head, queries, at_once), np.empty((0, 0, 0), np.float32)
    limits = line[USED], line[COUNT], among * line[COUNT], first, recent
    return fill(queries, rough, which, source, held, none, *limits)


@jitted
def _fetch(line, head, queries, products, recalling):
    # As `_fetch_packed`, where all are exact; products are brought up to date.
    at_once, among, first, recent = recalling
    dim, read, used = queries.shape[1], line[SOURCE + USED], line[USED]
    far_keys, far_values, _ = _entries(line, SOURCE, head, dim)
    held_keys, held_values, held_positions = _entries(line, 0, head, dim)
    keys, values, positions = held_keys[0], held_values[0], held_positions[0]
    rough = _rough(line, head, queries.reshape(1, *queries.shape), at_once)[0]
    slot_of, mark = np.full(read, -1, np.int32), np.zeros(read, np.uint8)
    for slot in range(used):
        slot_of[positions[slot]] = slot
    named = candidates(rough, among * line[COUNT], first, recent)
    asked = _products(queries, far_keys[0], named, products, slot_of)
    best = wanted(named, asked, line[COUNT], first + recent)
    none = np.empty(0, np.int32)
    coming, leaving = exchanged(best, rough, positions, none, 0, used, mark)
    for i in range(coming.size):
        fetch_vector(far_values[0], coming[i])
    for i in range(coming.size):
        slot, entry = leaving[i], coming[i]
        for d in range(dim):
            keys[slot, d], values[slot, d] = far_keys[0, entry, d], far_values[0, entry, d]
        positions[slot] = entry
    changed = np.empty((len(queries), coming.size), np.float32)
    multiply(queries, keys, leaving, changed, 0)
    for row in range(len(queries)):
        for i in range(coming.size):
            products[row, leaving[i]] = changed[row, i]
    return coming.size


@jitted
def _products(queries, keys, named, products, slot_of):
    # Those that are held have theirs in `products`.
    rows, count = queries.shape[0], named.size
    far, places, others = np.empty(count, np.int64), np.empty(count, np.int64), 0
    out = np.empty((rows, count), np.float32)
    for i in range(count):
        slot = slot_of[named[i]]
        far[others], places[others] = named[i], i
        others += slot < 0
        if slot < 0:
            fetch_vector(keys, named[i])
        for row in range(rows):
            out[row, i] = products[row, max(slot, 0)]
    made = np.empty((rows, others), np.float32)
    multiply(queries, keys, far[:others], made, 0)
    for row in range(rows):
        for i in range(others):
            out[row, places[i]] = made[row, i]
    return out
