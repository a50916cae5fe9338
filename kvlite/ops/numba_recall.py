"""Recall on a CPU, compiled by numba: a head group is given the entries that one token wants most.

`kvlite.offload.kv.swap` does the same with torch's functions.
"""

import numpy as np

from kvlite.ops.numba_codes import count_of, multiply_packed, put, restore
from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_vectors import close_exp, dot_rows, fetch_vector, hadamard, highest

# Keys are on their way while those of so many entries before them are read.
AHEAD = 8


@jitted
def _key(number):
    """A whole number from 0 to 2^32 - 1, ascending with a number; 0 for what is none."""
    bits = np.float32(number).view(np.uint32)
    turned = bits ^ np.uint32(0xFFFFFFFF if bits >> np.uint32(31) else 0x80000000)
    return np.uint32(turned if number == number else 0)


@jitted
def _least(keys, count):
    """A number that the `count` largest keys reach and, unless some are alike, no others; and how
    many do. A bit is found by counting all, which is done many at once."""
    least, reach, bit = np.uint32(0), keys.size, 31
    while bit >= 0 and reach != count:
        trial, found = least | np.uint32(1 << bit), np.int32(0)
        for i in range(keys.size):
            found += np.int32(keys[i] >= trial)
        if found >= count:
            least, reach = trial, found
        bit -= 1
    return least, reach


@jitted
def largest(numbers, first, last, count):
    """Where the `count` largest are, between two places, in order of place; of equal ones the
    earlier. What is no number comes last."""
    size = last - first
    if count >= size or not count:
        return np.arange(first, first + min(count, size))
    part, keys = numbers[first:last], np.empty(size, np.uint32)
    for i in range(size):
        keys[i] = _key(part[i])
    least, reach = _least(keys, count)
    places, found = np.empty(reach + 1, np.int64), 0
    for i in range(size):
        places[found] = first + i
        found += keys[i] >= least
    # Of those that are alike, the later ones may be too many.
    spare, found = reach - count, reach
    while spare:
        found -= 1
        if keys[places[found] - first] == least:
            places[found], spare = -1, spare - 1
    kept = 0
    for i in range(reach):
        places[kept] = places[i]
        kept += places[i] >= 0
    return places[:count]


@jitted
def candidates(rough, count, first, recent):
    """The places of the `count` entries that get most attention, by an estimate; the first few and
    the recent ones before all others."""
    entries, ends = rough.size, first + recent
    chosen = largest(rough, first, entries - recent, count - ends)
    named = np.empty(ends + chosen.size, np.int64)
    for i in range(ends):
        named[i] = i if i < first else entries - ends + i
    for i in range(chosen.size):
        named[ends + i] = chosen[i]
    return named


@jitted
def products_of(queries, keys, packed, sizes, head, named, held_keys, slot_of):
    """A head's products `(rows, entries)` with the entries that were named.

    Args:
        keys, packed, sizes: of everything, as `fill` has it.
        held_keys: `(slots, dim)`, where the key of an entry that is held is read, which is sooner
            there; of those alone for which `slot_of` has a slot.
    """
    (start, bits, _), middle, exact = sizes, count_of(packed), keys[head]
    products = np.empty((len(queries), named.size), np.float32)
    older, at, found = np.empty(named.size, np.int64), np.empty(named.size, np.int64), 0
    for i in range(named.size):
        if not middle and i + AHEAD < named.size:
            ahead = named[i + AHEAD]
            slot = slot_of[ahead]
            fetch_vector(held_keys if slot >= 0 else exact, slot if slot >= 0 else ahead)
        place, slot = named[i] - start, slot_of[named[i]]
        if slot >= 0:
            dot_rows(queries, held_keys, slot, products, i)
        elif 0 <= place < middle:
            older[found], at[found] = place, i
            found += 1
        else:
            dot_rows(queries, exact, named[i] - (middle if place >= middle else 0), products, i)
    made = np.empty((len(queries), found), np.float32)
    if packed is not None and found:
        multiply_packed(queries, packed, head, older[:found], bits, made, 0)
    for row in range(len(queries)):
        for i in range(found):
            products[row, at[i]] = made[row, i]
    return products


@jitted
def wanted(named, products, count, ends):
    """The `count` entries that a head's rows want most: the first `ends` of those named, and what
    gets most attention among all of these, by their products `(rows, entries)`, which are lost."""
    weights = np.zeros(named.size, np.float32)
    for row in range(products.shape[0]):
        line, whole = products[row], np.float32(0)
        top = highest(line)
        for i in range(named.size):
            line[i] = close_exp(line[i] - top)
            whole += line[i]
        share = np.float32(1) / whole
        for i in range(named.size):
            weights[i] += line[i] * share
    for i in range(named.size):
        if i < ends:
            weights[i] = np.inf
        elif not weights[i] >= 0:
            weights[i] = 0
    best = largest(weights, 0, weights.size, count)
    for i in range(best.size):
        best[i] = named[best[i]]
    return best


@jitted
def exchanged(best, rough, own_positions, positions, start, slots, mark):
    """The entries of `best` that are not held, and the slots of those worth least, which give way.
    `mark`, 0 for every entry, is so again."""
    for at in best:
        mark[at] = 1
    worth = _worth(rough, own_positions, positions, start, slots, mark)
    missing, found = 0, 0
    for at in best:
        missing += mark[at] == 1
    coming = np.empty(missing, np.int64)
    for at in best:
        if mark[at] == 1:
            coming[found] = at
            found += 1
        mark[at] = 0
    return coming, largest(worth, 0, worth.size, missing)


@jitted
def _swap(far, far_packed, far_sizes, own, packed, sizes, of, head, coming, leaving):
    (keys, values, _), (start, bits, value_bits), middle = far, far_sizes, count_of(far_packed)
    own_keys, own_values, own_positions = own
    (own_start, own_bits, own_value_bits), own_middle = sizes, count_of(packed)
    dim = keys.shape[2]
    one, other = np.empty((1, dim), np.float32), np.empty((1, dim), np.float32)
    key, value = one[0], other[0]
    for i in range(coming.size):
        place, slot = coming[i] - start, leaving[i]
        if far_packed is not None and 0 <= place < middle:
            _restore(far_packed, of, coming[i : i + 1] - start, bits, value_bits, one, other)
        else:
            entry = coming[i] - (middle if place >= middle else 0)
            for d in range(dim):
                key[d], value[d] = keys[of, entry, d], values[of, entry, d]
        place = slot - own_start
        if packed is not None and 0 <= place < own_middle:
            _put(packed, head, place, own_bits, own_value_bits, key, value)
            packed[6][head, place] = coming[i]
        else:
            slot -= own_middle if place >= own_middle else 0
            for d in range(dim):
                own_keys[head, slot, d], own_values[head, slot, d] = key[d], value[d]
            own_positions[head, slot] = coming[i]


@jitted
def _restore(packed, head, at, bits, value_bits, key, value):
    restore(packed[0][head], packed[1][head], packed[2][head], at, bits, key)
    restore(packed[3][head], packed[4][head], packed[5][head], at, value_bits, value)
    hadamard(key[0])
    hadamard(value[0])
    for d in range(key.shape[1]):
        key[0, d] += packed[7][head, d]


@jitted
def _put(packed, head, place, bits, value_bits, key, value):
    for d in range(key.size):
        key[d] -= packed[7][head, d]
    put(key, packed[0], packed[1], packed[2], head, place, bits)
    put(value, packed[3], packed[4], packed[5], head, place, value_bits)


@jitted
def _worth(rough, own_positions, positions, start, slots, mark):
    # Less than nothing if it is wanted; those that are wanted and held get mark 2.
    middle = positions.size
    worth = np.empty(slots, np.float32)
    for slot in range(slots):
        if slot < start or not middle:
            at = own_positions[slot]
        elif slot < start + middle:
            at = positions[slot - start]
        else:
            at = own_positions[slot - middle]
        worth[slot] = -rough[at] if rough[at] > 0 else 0
        if mark[at] == 1:
            mark[at] = 2
            worth[slot] = -np.inf
    return worth


@jitted
def fill_head(
    queries, rough, far, far_packed, far_sizes, of, own, packed, sizes, head, slots, limits
):  # fmt: skip
    """As `fill`, for KV head `of`, which is `head` of the head group; returns the slots that other
    entries came to. What is quantized is None where all is exact."""
    count, among, first, recent = limits
    slot_of, mark = np.full(rough.size, -1, np.int32), np.zeros(rough.size, np.uint8)
    positions = own[2][head, :0]
    if packed is not None:
        positions = packed[6][head, : packed[8]]
    # Both alike: what is held is what the source has.
    if not count_of(packed) and not count_of(far_packed):
        for slot in range(slots):
            slot_of[own[2][head, slot]] = slot
    named = candidates(rough, among, first, recent)
    products = products_of(queries, far[0], far_packed, far_sizes, of, named, own[0][head], slot_of)
    best = wanted(named, products, count, first + recent)
    coming, leaving = exchanged(best, rough, own[2][head], positions, sizes[0], slots, mark)
    _swap(far, far_packed, far_sizes, own, packed, sizes, of, head, coming, leaving)
    return leaving


@jitted
def fill(queries, scores, heads, source, held, rows, slots, count, among, first, recent):
    """Let a head group hold the `count` entries that one token wants most.

    Args:
        queries: `(heads of the group, rows, dim)` float32, scaled.
        scores: `(KV heads, n)` float32, roughly the attention that entries get.
        heads: `(heads of the group,)` int64, which of the KV heads they are.
        source: everything, of all KV heads, in three parts: keys and values `(heads, slots, dim)`
            float32 and positions `(heads, slots)` int32, exact; what `Packed` holds of the entries
            between them, none if all are exact; how many exact ones come before those, and the bits
            of keys and values. Place is position.
        held: likewise, of the head group's heads; written.
        rows: `(heads of the group, R, slots)` float32, what was remembered of the entries held;
            cleared where they give way.
        slots: how many the head group has filled.
        among: how many entries' keys are looked at.
        first, recent: entries at both ends that are always wanted.

    Returns:
        How many came, of all heads.
    """
    limits, num_fetched = (count, among, first, recent), 0
    for head in range(heads.size):
        of = heads[head]
        leaving = fill_head(queries[head], scores[of], *source, of, *held, head, slots, limits)
        num_fetched += leaving.size
        for slot in leaving:
            for row in range(rows.shape[1]):
                rows[head, row, slot] = 0
    return num_fetched
