"""One token of each of several conversations on a CPU, compiled by numba: its entry is written,
what it wants is fetched, and it attends, in one call a layer for all of them.

What a conversation holds lies where it lies: loops are given addresses, a line of whole numbers for
each, whose columns are named here.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from kvlite.ops.numba_attention import products_of_held, weighed
from kvlite.ops.numba_quant import Part, in_threads, thread_parts
from kvlite.ops.numba_recall import candidates, exchanged, fill, wanted
from kvlite.ops.numba_search import add, search
from kvlite.ops.numba_vectors import fetch_vector, jitted, multiply

Array = np.ndarray
# Of what is held, and from `SOURCE` on of the host store: where exact keys, values and positions of
# all KV heads are, how many slots for them a head has, how many entries, this token's included.
KEYS, VALUES, POSITIONS, SLOTS, USED = range(5)
# Of those that are quantized: how many, behind how many exact ones; bits of keys and values, groups
# of these; where `Packed` has its tensors.
PACKED, START, BITS, VALUE_BITS, GROUPS, VALUE_GROUPS, TENSORS = range(5, 12)
SOURCE = TENSORS + 8
# Where the index has signs, sizes, the mean and the balance; slots a head; keys in it.
SIGNS, SIZES, MEAN, BALANCE, INDEX_SLOTS, INDEXED = range(2 * SOURCE, 2 * SOURCE + 6)
# The token's position, and how many entries it wants of each KV head, 0 if it fetches none.
POSITION, COUNT = INDEXED + 1, INDEXED + 2


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
        q: `(conversations, KV heads, rows, dim)` float32, scaled.
        k, v: `(conversations, KV heads, dim)` float32.
        lines: of each conversation all columns; where there is no host store, its columns and the
            index's are 0.
        softcap, sinks: as in `kvlite.ops.softmax`; sinks `(KV heads, rows)` float32.
        recalling: after how many keys the index takes them; how many candidates for one that is
            wanted; how many of the first and of the recent entries are always wanted.

    Returns:
        output in the shape of q; and how many entries came, `(conversations,)` int64.
    """
    out, came = np.empty_like(q), np.zeros(len(q), np.int64)
    if sinks is None:
        sinks = _no_sinks(*q.shape[1:3])
    table, bent = np.array(lines, np.int64), float(softcap or 0)
    fetches = any(line[SOURCE] for line in lines)
    most = max(line[USED] for line in lines)

    def work(part: Part) -> None:
        if fetches:
            attend_fetching(q, k, v, table, bent, sinks, *recalling, out, came, *part)
        else:
            attend_held(q, k, v, table, bent, sinks, out, *part)

    in_threads(work, thread_parts(len(q), most * k.shape[1] * k.shape[2]))
    return out, came


@cache
def _no_sinks(heads: int, rows: int) -> Array:
    return np.full((heads, rows), -np.inf, np.float32)


def _pointer(kind: Any) -> Callable[..., Any]:
    """What takes an address for that of numbers."""

    @intrinsic
    def pointer(context, address):
        return types.CPointer(kind)(types.int64), _as_pointer

    return pointer  # type: ignore[no-any-return]


def _as_pointer(context, builder, signature, arguments):
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


_numbers, _places, _words = map(_pointer, (types.float32, types.int32, types.uint64))
_codes, _halves = _pointer(types.uint8), _pointer(types.uint16)


@jitted
def _entries(line, first, heads, dim):
    """Exact keys, values and positions that a line says where to find, from a column on."""
    shape = heads, line[first + SLOTS], dim
    keys = carray(_numbers(line[first + KEYS]), shape)
    values = carray(_numbers(line[first + VALUES]), shape)
    return keys, values, carray(_places(line[first + POSITIONS]), shape[:2])


@jitted
def _whole(line, first, heads, dim):
    """All entries likewise, as `numba_recall.fill` takes them."""
    count, at = line[first + PACKED], first + TENSORS
    bits, value_bits = line[first + BITS], line[first + VALUE_BITS]
    groups = heads, line[first + GROUPS], count
    value_groups = heads, line[first + VALUE_GROUPS], count
    packed = (
        carray(_codes(line[at]), (heads, count, dim * bits // 8)),
        carray(_halves(line[at + 1]), groups),
        carray(_halves(line[at + 2]), groups),
        carray(_codes(line[at + 3]), (heads, count, dim * value_bits // 8)),
        carray(_halves(line[at + 4]), value_groups),
        carray(_halves(line[at + 5]), value_groups),
        carray(_places(line[at + 6]), (heads, count)),
        carray(_numbers(line[at + 7]), (heads, dim)),
    )
    return _entries(line, first, heads, dim), packed, (line[first + START], bits, value_bits)


@jitted
def _write(line, first, k, v):
    """Write the token's entry, the last one."""
    keys, values, positions = _entries(line, first, k.shape[0], k.shape[1])
    place = line[first + USED] - line[first + PACKED] - 1
    for head in range(k.shape[0]):
        for d in range(k.shape[1]):
            keys[head, place, d], values[head, place, d] = k[head, d], v[head, d]
        positions[head, place] = line[POSITION]


@jitted
def attend_held(q, k, v, table, softcap, sinks, out, begin, end):
    """Likewise, where nothing is fetched, which takes long to compile."""
    for each in range(begin, end):
        line = table[each]
        _write(line, 0, k[each], v[each])
        entries, packed, sizes = _whole(line, 0, k.shape[1], k.shape[2])
        products = products_of_held(q[each], entries[:2], packed, sizes, line[USED])
        weighed(products, entries[:2], packed, sizes, softcap, sinks, out[each])


@jitted
def attend_fetching(
    q, k, v, table, softcap, sinks, at_once, among, first, recent, out, came, begin, end
):
    """As `attend`, of the conversations from `begin` to before `end`."""
    for each in range(begin, end):
        line, queries = table[each], q[each]
        _write(line, 0, k[each], v[each])
        if line[SOURCE]:
            _tell(line, k[each], v[each], at_once)
        most = among * line[COUNT]
        if line[COUNT] and line[PACKED] + line[SOURCE + PACKED]:
            came[each] = _fetch_packed(line, queries, at_once, most, first, recent)
        entries, packed, sizes = _whole(line, 0, k.shape[1], k.shape[2])
        products = products_of_held(queries, entries[:2], packed, sizes, line[USED])
        if line[COUNT] and not line[PACKED] + line[SOURCE + PACKED]:
            came[each] = _fetch(line, queries, products, at_once, most, first, recent)
        weighed(products, entries[:2], packed, sizes, softcap, sinks, out[each])


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
    _write(line, SOURCE, k, v)
    read, packed = line[SOURCE + USED], line[SOURCE + PACKED]
    if _indexed(line, at_once) == read:
        signs, sizes, mean, balance = _index(line, heads, dim)
        keys = _entries(line, SOURCE, heads, dim)[0]
        # What the answer adds comes after all that is quantized.
        new = keys[:, line[INDEXED] - packed : read - packed].copy()
        add(new, mean, balance, signs, sizes, line[INDEXED])


@jitted
def _rough(line, queries, at_once):
    """Roughly the attention that entries of the host store get."""
    signs, sizes, _, balance = _index(line, queries.shape[0], queries.shape[2])
    return search(queries, balance, signs, sizes, _indexed(line, at_once), line[SOURCE + USED])


@jitted
def _fetch_packed(line, queries, at_once, most, first, recent):
    """Bring what is wanted most into each head, where some entries are quantized; returns how many
    came."""
    heads, _, dim = queries.shape
    source, held = _whole(line, SOURCE, heads, dim), _whole(line, 0, heads, dim)
    rough, none = _rough(line, queries, at_once), np.empty((0, 0, 0), np.float32)
    given = line[USED], line[COUNT], most, first, recent
    return fill(queries, rough, np.arange(heads), source, held, none, *given)


@jitted
def _fetch(line, queries, products, at_once, most, first, recent):
    """As `_fetch_packed`, where all are exact; and bring products `(heads, rows, slots)` up to
    date."""
    heads, rows, dim = queries.shape
    source, read, used = _entries(line, SOURCE, heads, dim), line[SOURCE + USED], line[USED]
    held, rough = _entries(line, 0, heads, dim), _rough(line, queries, at_once)
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
            fetch_vector(source[1][head], coming[i])
        for i in range(coming.size):
            keys[leaving[i]] = source[0][head, coming[i]]
            values[leaving[i]] = source[1][head, coming[i]]
            positions[leaving[i]] = coming[i]
        changed = np.empty((rows, coming.size), np.float32)
        multiply(queries[head], keys, leaving, changed, 0)
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
    multiply(queries, keys, far[:others], made, 0)
    for row in range(rows):
        for i in range(others):
            out[row, places[i]] = made[row, i]
    return out
