"""One token of each of several conversations on a CPU, compiled by numba: its entry is written,
what it wants is fetched, and it attends, in one call a layer for all of them.

What a conversation holds lies where it lies: loops are given addresses, a line of whole numbers for
each, whose columns are named here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from kvlite.ops import numba_recall
from kvlite.ops.numba_attention import softmax
from kvlite.ops.numba_quant import Part, in_threads, thread_parts
from kvlite.ops.numba_recall import fill
from kvlite.ops.numba_search import add, search
from kvlite.ops.numba_vectors import jitted

Array = np.ndarray
# Of what is held, and from `SOURCE` on of the host store: where keys, values and positions of all
# KV heads are, how many slots a head has, how many are filled, this token's included.
KEYS, VALUES, POSITIONS, SLOTS, USED = range(5)
SOURCE = 5
# Where the index has signs, sizes, the mean and the balance; slots a head; keys in it.
SIGNS, SIZES, MEAN, BALANCE, INDEX_SLOTS, INDEXED = range(10, 16)
# The token's position, and how many entries it wants of each KV head, 0 if it fetches none.
POSITION, COUNT = 16, 17


def attend(
    q: Array,
    k: Array,
    v: Array,
    table: Array,
    softcap: float | None,
    sinks: Array | None,
    recalling: tuple[int, int, int, int],
) -> tuple[Array, Array]:
    """Attention of one token a conversation, whose entry goes to the last filled slot of what is
    held and of its host store. Nothing is counted, so that it can be done again.

    Args:
        q: `(conversations, KV heads, rows, dim)` float32, scaled.
        k, v: `(conversations, KV heads, dim)` float32.
        table: `(conversations, columns)` int64; where there is no host store, its columns and the
            index's are 0.
        softcap, sinks: as in `kvlite.ops.softmax`; sinks `(KV heads, rows)` float32.
        recalling: after how many keys the index takes them; how many candidates for one that is
            wanted; how many of the first and of the recent entries are always wanted.

    Returns:
        output in the shape of q; and how many entries came, `(conversations,)` int64.
    """
    out, came = np.empty_like(q), np.zeros(len(q), np.int64)
    if sinks is None:
        sinks = np.full(q.shape[1:3], -np.inf, np.float32)
    fetches = bool(table[:, SOURCE].any())

    def work(part: Part) -> None:
        if fetches:
            _fetch(q, k, v, table, *recalling, came, *part)
        _attend(q, k, v, table, softcap or 0.0, sinks, out, *part)

    in_threads(work, thread_parts(len(q), int(table[:, USED].max()) * k.shape[1] * k.shape[2]))
    return out, came


def compile_all(wanted: Callable[[], bool]) -> None:
    """As of `numba_recall`, and what takes all of it together."""
    numba_recall.compile_all(wanted)
    real, whole = types.float32, types.int64
    given = real[:, :, :, ::1], real[:, :, ::1], real[:, :, ::1], whole[:, ::1]
    loops: list[tuple[Any, tuple[Any, ...]]] = [
        (_attend, (*given, types.float64, real[:, ::1], given[0], whole, whole)),
        (_fetch, (*given, *(whole,) * 4, whole[::1], whole, whole)),
    ]
    for loop, own in loops:
        if wanted():
            loop.compile(own)


@intrinsic
def _numbers(context, address):
    """float32 numbers at an address."""
    return types.CPointer(types.float32)(types.int64), _as_pointer


@intrinsic
def _places(context, address):
    """int32 numbers at an address."""
    return types.CPointer(types.int32)(types.int64), _as_pointer


@intrinsic
def _words(context, address):
    """uint64 numbers at an address."""
    return types.CPointer(types.uint64)(types.int64), _as_pointer


def _as_pointer(context, builder, signature, arguments):
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@jitted
def _entries(line, first, heads, dim):
    """Keys, values and positions that a line says where to find, from a column on."""
    shape = heads, line[first + SLOTS], dim
    keys = carray(_numbers(line[first + KEYS]), shape)
    values = carray(_numbers(line[first + VALUES]), shape)
    return keys, values, carray(_places(line[first + POSITIONS]), shape[:2])


@jitted
def _write(entries, place, position, k, v):
    keys, values, positions = entries
    for head in range(k.shape[0]):
        for d in range(k.shape[1]):
            keys[head, place, d], values[head, place, d] = k[head, d], v[head, d]
        positions[head, place] = position


@jitted
def _fetch(q, k, v, table, at_once, candidates, first, recent, came, begin, end):
    """Write entries, also to host stores, and let caches hold what their tokens want."""
    heads, dim = k.shape[1:]
    no_bytes, no_halves = np.empty((heads, 0, 0), np.uint8), np.empty((heads, 0, 0), np.uint16)
    no_places, no_mean = np.empty((heads, 0), np.int32), np.empty((heads, 0), np.float32)
    nothing = no_bytes, no_halves, no_halves, no_bytes, no_halves, no_halves, no_places, no_mean
    no_rows, every = np.empty((0, 0, 0), np.float32), np.arange(heads)
    for each in range(begin, end):
        line = table[each]
        if line[SOURCE] == 0:
            continue
        held, used = _entries(line, 0, heads, dim), line[USED]
        _write(held, used - 1, line[POSITION], k[each], v[each])
        source, read = _entries(line, SOURCE, heads, dim), line[SOURCE + USED]
        _write(source, read - 1, line[POSITION], k[each], v[each])
        words = -(-dim // 64)
        signs = carray(_words(line[SIGNS]), (heads, line[INDEX_SLOTS], words))
        sizes = carray(_numbers(line[SIZES]), (heads, line[INDEX_SLOTS]))
        mean = carray(_numbers(line[MEAN]), (heads, dim))
        balance, indexed = carray(_numbers(line[BALANCE]), (heads, dim)), line[INDEXED]
        if read - indexed == at_once:
            add(source[0][:, indexed:read].copy(), mean, balance, signs, sizes, indexed)
            indexed = read
        if line[COUNT]:
            scores = search(q[each], balance, signs, sizes, indexed, read)
            given = (source, nothing, (0, 0, 0)), (held, nothing, (0, 0, 0)), no_rows
            count = line[COUNT]
            came[each] = fill(
                q[each], scores, every, *given, used, count, candidates * count, first, recent
            )


@jitted
def _attend(q, k, v, table, softcap, sinks, out, begin, end):
    """Write entries, and attend to what caches hold."""
    heads, dim = k.shape[1:]
    for each in range(begin, end):
        line = table[each]
        held, used = _entries(line, 0, heads, dim), line[USED]
        _write(held, used - 1, line[POSITION], k[each], v[each])
        for head in range(heads):
            keys, values = held[0][head], held[1][head]
            _over(q[each, head], keys, values, used, softcap, sinks[head], out[each, head])


@jitted
def _over(queries, keys, values, used, softcap, sinks, out):
    """Attention of a KV head's rows, `(rows, dim)`, over its first `used` entries."""
    rows, dim = queries.shape
    weights = np.empty((rows, used), np.float32)
    whole = used - used % 4
    for slot in range(0, whole, 4):
        one, two, three, four = keys[slot], keys[slot + 1], keys[slot + 2], keys[slot + 3]
        for row in range(rows):
            query = queries[row]
            a = b = c = d = np.float32(0)
            for i in range(dim):
                a += query[i] * one[i]
                b += query[i] * two[i]
                c += query[i] * three[i]
                d += query[i] * four[i]
            weights[row, slot], weights[row, slot + 1] = a, b
            weights[row, slot + 2], weights[row, slot + 3] = c, d
    for slot in range(whole, used):
        for row in range(rows):
            a = np.float32(0)
            for i in range(dim):
                a += queries[row, i] * keys[slot, i]
            weights[row, slot] = a
    out[:] = 0
    for row in range(rows):
        softmax(weights[row], softcap, sinks[row])
    for slot in range(0, whole, 4):
        one, two, three, four = values[slot], values[slot + 1], values[slot + 2], values[slot + 3]
        for row in range(rows):
            line = out[row]
            a, b = weights[row, slot], weights[row, slot + 1]
            c, d = weights[row, slot + 2], weights[row, slot + 3]
            for i in range(dim):
                line[i] += a * one[i] + b * two[i] + c * three[i] + d * four[i]
    for slot in range(whole, used):
        for row in range(rows):
            for i in range(dim):
                out[row, i] += weights[row, slot] * values[slot, i]
