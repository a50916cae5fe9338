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
from kvlite.ops.numba_recall import candidates, exchanged, wanted
from kvlite.ops.numba_search import add, search
from kvlite.ops.numba_vectors import dot_rows, fetch_vector, jitted, put, take

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
    bent = float(softcap or 0)
    fetches = bool(table[:, SOURCE].any())

    def work(part: Part) -> None:
        if fetches:
            _attend(q, k, v, table, bent, sinks, *recalling, out, came, *part)
        else:
            _attend_held(q, k, v, table, bent, sinks, out, *part)

    in_threads(work, thread_parts(len(q), int(table[:, USED].max()) * k.shape[1] * k.shape[2]))
    return out, came


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
def _attend_held(q, k, v, table, softcap, sinks, out, begin, end):
    """Where nothing is fetched, which takes long to compile."""
    for each in range(begin, end):
        held, products = _written(table[each], q[each], k[each], v[each])
        _weighed(products, held[1], softcap, sinks, out[each])


@jitted
def _attend(q, k, v, table, softcap, sinks, at_once, among, first, recent, out, came, begin, end):
    for each in range(begin, end):
        line = table[each]
        if line[SOURCE]:
            _tell(line, k[each], v[each], at_once)
        held, products = _written(line, q[each], k[each], v[each])
        if line[COUNT]:
            most = among * line[COUNT]
            came[each] = _fetch(line, q[each], held, products, at_once, most, first, recent)
        _weighed(products, held[1], softcap, sinks, out[each])


@jitted
def _written(line, queries, k, v):
    """What is held, a token's entry written, and its products `(heads, rows, slots)`."""
    heads, rows, dim = queries.shape
    held, slots = _entries(line, 0, heads, dim), np.arange(line[USED])
    _write(held, line[USED] - 1, line[POSITION], k, v)
    products = np.empty((heads, rows, slots.size), np.float32)
    for head in range(heads):
        _multiply(queries[head], held[0][head], slots, products[head])
    return held, products


@jitted
def _weighed(products, values, softcap, sinks, out):
    """Attention by the products, which are lost."""
    for head in range(out.shape[0]):
        for row in range(out.shape[1]):
            softmax(products[head, row], softcap, sinks[head, row])
        _weigh(products[head], values[head], out[head])


@jitted
def _index(line, heads, dim):
    """Signs, sizes, mean and balance that a line says where to find."""
    slots = heads, line[INDEX_SLOTS]
    signs = carray(_words(line[SIGNS]), (*slots, -(-dim // 64)))
    sizes = carray(_numbers(line[SIZES]), slots)
    mean = carray(_numbers(line[MEAN]), (heads, dim))
    return signs, sizes, mean, carray(_numbers(line[BALANCE]), (heads, dim))


@jitted
def _indexed(line, at_once):
    """How many keys the index has with this token: it takes so many at once."""
    read, known = line[SOURCE + USED], line[INDEXED]
    return read if read - known == at_once else known


@jitted
def _tell(line, k, v, at_once):
    """Write an entry into the host store, and its key into the index if it is time."""
    heads, dim = k.shape
    source, read = _entries(line, SOURCE, heads, dim), line[SOURCE + USED]
    _write(source, read - 1, line[POSITION], k, v)
    if _indexed(line, at_once) == read:
        signs, sizes, mean, balance = _index(line, heads, dim)
        new = source[0][:, line[INDEXED] : read].copy()
        add(new, mean, balance, signs, sizes, line[INDEXED])


@jitted
def _fetch(line, queries, held, products, at_once, most, first, recent):
    """Bring what is wanted most into each head, and its products `(heads, rows, slots)` up to date;
    returns how many entries came."""
    heads, rows, dim = queries.shape
    source, read, used = _entries(line, SOURCE, heads, dim), line[SOURCE + USED], line[USED]
    signs, sizes, _, balance = _index(line, heads, dim)
    rough = search(queries, balance, signs, sizes, _indexed(line, at_once), read)
    slot_of, mark = np.empty(read, np.int32), np.zeros(read, np.uint8)
    none, came = np.empty(0, np.int32), 0
    for head in range(heads):
        keys, values, positions = held[0][head], held[1][head], held[2][head]
        slot_of[:] = -1
        for slot in range(used):
            slot_of[positions[slot]] = slot
        named = candidates(rough[head], most, first, recent)
        own = _products(queries[head], source[0][head], named, products[head], slot_of)
        best = wanted(named, own, line[COUNT], first + recent)
        coming, leaving = exchanged(best, rough[head], positions, none, 0, used, mark)
        for i in range(coming.size):
            keys[leaving[i]] = source[0][head, coming[i]]
            values[leaving[i]] = source[1][head, coming[i]]
            positions[leaving[i]] = coming[i]
        changed = np.empty((rows, coming.size), np.float32)
        _multiply(queries[head], keys, leaving, changed)
        for row in range(rows):
            for i in range(coming.size):
                products[head, row, leaving[i]] = changed[row, i]
        came += coming.size
    return came


@jitted
def _products(queries, keys, named, products, slot_of):
    """A head's products `(rows, entries)` with the entries that were named: those that are held
    have theirs in `products`."""
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
    _multiply(queries, keys, far[:others], made)
    for row in range(rows):
        for i in range(others):
            out[row, places[i]] = made[row, i]
    return out


@jitted
def _multiply(queries, keys, places, out):
    """A head's products `(rows, entries)` with keys at some places."""
    whole = places.size - places.size % 4
    for i in range(0, whole, 4):
        one, two = keys[places[i]], keys[places[i + 1]]
        three, four = keys[places[i + 2]], keys[places[i + 3]]
        for row in range(queries.shape[0]):
            query = queries[row]
            a = b = c = d = np.float32(0)
            for j in range(query.size):
                a += query[j] * one[j]
                b += query[j] * two[j]
                c += query[j] * three[j]
                d += query[j] * four[j]
            out[row, i], out[row, i + 1], out[row, i + 2], out[row, i + 3] = a, b, c, d
    for i in range(whole, places.size):
        dot_rows(queries, keys, places[i], out, i)


@jitted
def _weigh(weights, values, out):
    """A head's values by the weights of its rows, `(rows, entries)`."""
    used = weights.shape[1]
    whole = used - used % 4
    out[:] = 0
    for i in range(0, whole, 4):
        one, two, three, four = values[i], values[i + 1], values[i + 2], values[i + 3]
        for row in range(out.shape[0]):
            line = out[row]
            a, b = weights[row, i], weights[row, i + 1]
            c, d = weights[row, i + 2], weights[row, i + 3]
            for j in range(line.size):
                line[j] += a * one[j] + b * two[j] + c * three[j] + d * four[j]
    for i in range(whole, used):
        for row in range(out.shape[0]):
            for j in range(out.shape[1]):
                out[row, j] += weights[row, i] * values[i, j]


def compile_all(wanted: Callable[[], bool]) -> None:
    """Compile what recall needs, or take it from the disk, as long as it is `wanted`: one loop at a
    time, so that little is left to wait for."""
    real, whole, place, byte = types.float32, types.int64, types.int32, types.uint8
    line, lines, blocks = real[::1], real[:, ::1], real[:, :, ::1]
    codes, halves = byte[:, :, ::1], types.uint16[:, :, ::1]
    own = types.Tuple((blocks, blocks, place[:, ::1]))
    packed = types.Tuple((codes, halves, halves, codes, halves, halves, place[:, ::1], lines))
    sizes = types.UniTuple(whole, 3)
    held = types.Tuple((own, packed, sizes))
    signs = types.uint64[:, :, ::1]
    rounded = (codes, halves, halves, whole, whole, whole)
    four = real[:, :, :, ::1]
    loops: list[tuple[Any, tuple[Any, ...]]] = [
        (search, (blocks, lines, signs, lines, whole, whole)),
        (add, (blocks, lines, lines, signs, lines, whole)),
        (numba_recall.largest, (line, whole, whole, whole)),
        (put, (line, *rounded)),
        (take, (*rounded, line)),
        (numba_recall.products_of, (lines, held, whole, whole[::1], lines, place[::1])),
        (numba_recall.fill, (blocks, lines, whole[::1], held, held, blocks, *(whole,) * 5)),
        (
            _attend_held,
            (four, blocks, blocks, whole[:, ::1], types.float64, lines, four, whole, whole),
        ),
        (
            _attend,
            (
                *(four, blocks, blocks, whole[:, ::1], types.float64, lines),
                *(*(whole,) * 4, four, whole[::1], whole, whole),
            ),
        ),
    ]
    for loop, given in loops:
        if not wanted():
            return
        loop.compile(given)
