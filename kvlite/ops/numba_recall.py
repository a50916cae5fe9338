"""Recall on a CPU, compiled by numba: a layer's index is searched, and its head group filled.

`Index.scores` and `recall.bring_back` do the same with torch's functions, of which each costs as
much as all of this does, on so little.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvlite.ops.numba_quant import jitted

PLANES = 4
# Scores fall into bins by their exponent and five bits of what follows it.
SHIFT = 18
BINS = (127 << 23 >> SHIFT) + 1


@intrinsic
def _ones(context, number):
    """How many bits of a number are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@jitted
def _exp(x):
    """e^x for x <= 0, to a third of a per cent, many at once: enough to name candidates."""
    power = max(x * np.float32(1.442695), np.float32(-125))
    whole = np.int32(power - np.float32(1))
    part = power - np.float32(whole)
    shape = np.float32(1) + part * (np.float32(0.6565) + part * np.float32(0.3435))
    return np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32) * shape


@jitted
def search(queries, words, sizes, used, entries):
    """Roughly the attention that every entry gets, the mean of a head's rows.

    A query is rounded to 16 steps, so that its product with signs is a count of ones: as in
    "RaBitQ: Quantizing High-Dimensional Vectors with a Theoretical Error Bound for Approximate
    Nearest Neighbor Search", section 3.3.

    Args:
        queries: `(heads, rows, dim)` float32, as `Index.turned` makes them.
        words: `(heads, capacity, count)` uint64, signs.
        sizes: `(heads, capacity)` float32.
        used: how many are in the index, of so many entries.

    Returns:
        `(heads, entries)` float32, 0 for those that are not.
    """
    heads, rows, dim = queries.shape
    count = words.shape[2]
    scores = np.zeros((heads, entries), np.float32)
    line = np.empty(used, np.float32)
    planes = np.empty((count, PLANES), np.uint64)
    ones = np.empty(used, np.int32)
    levels = np.empty(used, np.int32)
    for head in range(heads):
        ones[:] = 0
        for w in range(count):
            for i in range(used):
                ones[i] += np.int32(_ones(words[head, i, w]))
        for row in range(rows):
            query = queries[head, row]
            low, high = query[0], query[0]
            for d in range(dim):
                low, high = min(low, query[d]), max(high, query[d])
            step = (high - low) / np.float32(2**PLANES - 1) + np.float32(1e-30)
            planes[:] = 0
            total = np.float32(0)
            for d in range(dim):
                total += query[d]
                level = np.uint64(int((query[d] - low) / step + np.float32(0.5)))
                # As `packed_codes` lays channels out.
                spot = d % (8 * count) * 8 + d // (8 * count)
                for plane in range(PLANES):
                    bit = (level >> np.uint64(plane)) & np.uint64(1)
                    planes[spot // 64, plane] |= bit << np.uint64(spot % 64)
            levels[:] = 0
            for w in range(count):
                one, two, four, eight = planes[w, 0], planes[w, 1], planes[w, 2], planes[w, 3]
                for i in range(used):
                    word = words[head, i, w]
                    found = _ones(word & one) + (_ones(word & two) << np.uint64(1))
                    found += _ones(word & four) << np.uint64(2)
                    found += _ones(word & eight) << np.uint64(3)
                    levels[i] += np.int32(found)
            slope, shift = np.float32(2) * step, np.float32(2) * low
            top = np.float32(-np.inf)
            for i in range(used):
                signed = slope * np.float32(levels[i]) + shift * np.float32(ones[i]) - total
                line[i] = signed * sizes[head, i]
                top = max(top, line[i])
            whole = np.float32(0)
            for i in range(used):
                line[i] = _exp(line[i] - top)
                whole += line[i]
            for i in range(used):
                scores[head, i] += line[i] / (whole * np.float32(rows))
    return scores


@jitted
def _row(first, last):
    """The places from `first` to before `last`."""
    places = np.empty(max(0, last - first), np.int64)
    for i in range(places.size):
        places[i] = first + i
    return places


@jitted
def _ranked(numbers, rank):
    """The number that would be at place `rank` if they were sorted; `np.partition`, which takes ten
    seconds to compile."""
    some = numbers.copy()
    low, high = 0, some.size - 1
    while low < high:
        pivot = some[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while some[i] < pivot:
                i += 1
            while some[j] > pivot:
                j -= 1
            if i <= j:
                some[i], some[j] = some[j], some[i]
                i += 1
                j -= 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            break
    return some[rank]


@jitted
def _largest(numbers, count):
    """Where the `count` largest are, in order of place."""
    size = numbers.size
    if count >= size or not count:
        return _row(0, min(count, size))
    least = _ranked(numbers, size - count)
    places = np.zeros(count, np.int64)
    above = 0
    for i in range(size):
        above += numbers[i] > least
    alike, found = count - above, 0
    for i in range(size):
        if numbers[i] > least or (numbers[i] == least and alike > 0):
            alike -= numbers[i] == least
            places[found] = i
            found += 1
    return places[:found]


@jitted
def _likeliest(scores, first, last, count, tally):
    """Where the `count` largest of scores from 0 to 1 are, between two places, in their order.

    Args:
        tally: room for `BINS` numbers.
    """
    if count >= last - first:
        return _row(first, last)
    tally[:] = 0
    for i in range(first, last):
        tally[_bin(scores[i])] += 1
    least, above = BINS, 0
    while above < count:
        least -= 1
        above += tally[least]
    places = np.empty(count, np.int64)
    edge = np.empty(tally[least], np.int64)
    worth = np.zeros(tally[least], np.float32)
    found, at_edge = 0, 0
    for i in range(first, last):
        bin = _bin(scores[i])
        if bin > least:
            places[found] = i
            found += 1
        elif bin == least:
            edge[at_edge] = i
            if scores[i] > 0:
                worth[at_edge] = scores[i]
            at_edge += 1
    best = _largest(worth, count - found)
    for i in range(best.size):
        places[found + i] = edge[best[i]]
    return places


@jitted
def _bin(score):
    """Ascending with a score from 0 to 1; what is no number is in the first."""
    return min(np.float32(score).view(np.int32) >> SHIFT, BINS - 1) if score > 0 else 0


@jitted
def _attention(queries, keys, named):
    """What attention some entries get of a head's rows, among themselves; summed over rows."""
    weights = np.zeros(named.size, np.float32)
    line = np.empty(named.size, np.float32)
    for row in range(queries.shape[0]):
        query, top = queries[row], np.float32(-np.inf)
        for i in range(named.size):
            key = keys[named[i]]
            product = np.float32(0)
            for d in range(key.size):
                product += query[d] * key[d]
            line[i] = product
            top = max(top, product)
        whole = np.float32(0)
        for i in range(named.size):
            line[i] = np.exp(line[i] - top)
            whole += line[i]
        for i in range(named.size):
            weights[i] += line[i] / whole
    return weights


@jitted
def fill(queries, scores, heads, source, head_group, slots, count, candidates, first, recent):
    """Let a head group hold the `count` entries that one token wants most.

    Args:
        queries: `(heads of the group, rows, dim)` float32, scaled.
        scores: `(KV heads, n)` float32, roughly the attention that entries get.
        heads: `(heads of the group,)` int64, which of the KV heads they are.
        source: keys and values `(KV heads, capacity, dim)` of everything; place is position.
        head_group: keys and values `(heads of the group, capacity, dim)` and positions `(heads
            of the head group, capacity)` int32; written.
        slots: how many are filled.
        candidates: how many entries' keys are looked at.
        first, recent: entries at both ends that are always wanted.

    Returns:
        How many came, of all heads.
    """
    keys, values = source
    came = 0
    residual_keys, residual_values, residual_positions = head_group
    entries = scores.shape[1]
    mark = np.zeros(entries, np.uint8)
    tally = np.empty(BINS, np.int32)
    for head in range(heads.size):
        layer_head = heads[head]
        rough = scores[layer_head]
        ends = first + recent
        chosen = _likeliest(rough, first, entries - recent, candidates - ends, tally)
        named = np.empty(ends + chosen.size, np.int64)
        for i in range(ends):
            named[i] = i if i < first else entries - ends + i
        for i in range(chosen.size):
            named[ends + i] = chosen[i]
        weights = _attention(queries[head], keys[layer_head], named)
        for i in range(named.size):
            if i < ends:
                weights[i] = np.inf
            elif not weights[i] >= 0:
                weights[i] = 0
        best = _largest(weights, count)
        for i in best:
            mark[named[i]] = 1
        worth = np.empty(slots, np.float32)
        for slot in range(slots):
            at = residual_positions[head, slot]
            worth[slot] = -rough[at] if rough[at] > 0 else 0
            if mark[at] == 1:
                mark[at] = 2
                worth[slot] = -np.inf
        missing = 0
        for i in best:
            missing += mark[named[i]] == 1
        came += missing
        leaving = _largest(worth, missing)
        out = 0
        for i in best:
            at = named[i]
            if mark[at] == 1:
                slot = leaving[out]
                for d in range(keys.shape[2]):
                    residual_keys[head, slot, d] = keys[layer_head, at, d]
                    residual_values[head, slot, d] = values[layer_head, at, d]
                residual_positions[head, slot] = at
                out += 1
            mark[at] = 0
    return came


def compile_all(wanted: Callable[[], bool]) -> None:
    """Compile what is above, or take it from the disk, as long as it is `wanted`: one loop at a
    time, so that little is left to wait for."""
    real, whole, place = types.float32, types.int64, types.int32
    line, lines, blocks = real[::1], real[:, ::1], real[:, :, ::1]
    signs, places = types.uint64[:, :, ::1], whole[::1]
    source = types.UniTuple(blocks, 2)
    head_group = types.Tuple((blocks, blocks, place[:, ::1]))
    loops: list[tuple[Any, tuple[Any, ...]]] = [
        (_exp, (real,)),
        (search, (blocks, signs, lines, whole, whole)),
        (_row, (whole, whole)),
        (_ranked, (line, whole)),
        (_largest, (line, whole)),
        (_bin, (real,)),
        (_likeliest, (line, whole, whole, whole, place[::1])),
        (_attention, (lines, lines, places)),
        (fill, (blocks, lines, places, source, head_group, *(whole,) * 5)),
    ]
    for loop, given in loops:
        if not wanted():
            return
        loop.compile(given)
