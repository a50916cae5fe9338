"""Recall's index on a CPU, compiled by numba: a token's search, and the answer's own keys.

`kvlite.offload.kv.index` does the same with torch's functions, of which each costs as much as all
of this does, on so little.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvlite.ops.numba_vectors import hadamard, highest, jitted

# Channels of a query are rounded to whole steps from 0 to the last.
LAST_STEP = 15
# Rows that one sum counts for, 16 bits each.
LANES = 4
# Entries whose sums lie in the nearest cache.
PART = 1024


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
def _spot(channel, count):
    """The bit of a channel among `count` words, as `packed_codes` lays channels out."""
    return channel % (8 * count) * 8 + channel // (8 * count)


@jitted
def _rounded(query, lane, spots):
    """Round a query's channels to steps, and add each to its bit's sum, in one lane.

    Args:
        spots: `(64 * words,)` uint64.

    Returns:
        the size of a step, the least channel, and the sum of all.
    """
    low, high, total = query[0], query[0], np.float32(0)
    for d in range(query.size):
        low, high = min(low, query[d]), max(high, query[d])
        total += query[d]
    step = (high - low) / np.float32(LAST_STEP) + np.float32(1e-30)
    for d in range(query.size):
        level = np.uint64(int((query[d] - low) / step + np.float32(0.5)))
        spots[_spot(d, spots.size // 64)] += level << np.uint64(16 * lane)
    return step, low, total


@jitted
def _sums_of_bytes(spots, sums):
    """What the bits that are set in a byte add up to, `(bytes, 256)`, for each byte of a key."""
    for byte in range(sums.shape[0]):
        sums[byte, 0] = 0
        for bit in range(8):
            more = spots[8 * byte + bit]
            for i in range(1 << bit):
                sums[byte, (1 << bit) + i] = sums[byte, i] + more


@jitted
def _logits(words, sums, steps, sizes, lanes, out):
    """Estimated logits of up to `LANES` rows, `out` `(lanes, entries)`, a part at a time.

    Args:
        words: `(capacity, count)` uint64; sizes: `(capacity,)` float32.
        sums: from `_sums_of_bytes`.
        steps: what `_rounded` returned, a row each.
    """
    used = out.shape[1]
    levels, ones = np.empty(PART, np.uint64), np.empty(PART, np.int32)
    for start in range(0, used, PART):
        some = min(PART, used - start)
        for w in range(words.shape[1]):
            for i in range(some):
                word, found = words[start + i, w], np.uint64(0)
                for byte in range(8):
                    found += sums[8 * w + byte, (word >> np.uint64(8 * byte)) & np.uint64(255)]
                levels[i] = found if w == 0 else levels[i] + found
                ones[i] = np.int32(_ones(word)) + (np.int32(0) if w == 0 else ones[i])
        for lane in range(lanes):
            slope, shift = np.float32(2) * steps[lane, 0], np.float32(2) * steps[lane, 1]
            total, place = steps[lane, 2], np.uint64(16 * lane)
            for i in range(some):
                level = np.float32(np.int32((levels[i] >> place) & np.uint64(0xFFFF)))
                signed = slope * level + shift * np.float32(ones[i]) - total
                out[lane, start + i] = signed * sizes[start + i]


@jitted
def search(queries, balance, words, sizes, used, entries):
    """Roughly the attention that every entry gets, the mean of a head's rows.

    A query is rounded to 16 steps, so that its product with signs is a sum of whole numbers: as in
    "RaBitQ: Quantizing High-Dimensional Vectors with a Theoretical Error Bound for Approximate
    Nearest Neighbor Search", section 3.3. A byte of signs looks its part up, of four rows at once.

    Args:
        queries: `(heads, rows, dim)` float32, scaled.
        balance: `(heads, dim)` float32, see `Index`.
        words: `(heads, capacity, count)` uint64, signs.
        sizes: `(heads, capacity)` float32.
        used: how many are in the index, of so many entries.

    Returns:
        `(heads, entries)` float32, 0 for those that are not.
    """
    heads, rows, dim = queries.shape
    count = words.shape[2]
    scores = np.zeros((heads, entries), np.float32)
    spots, sums = np.empty(64 * count, np.uint64), np.empty((8 * count, 256), np.uint64)
    lines, turned = np.empty((LANES, used), np.float32), np.empty(dim, np.float32)
    steps = np.empty((LANES, 3), np.float32)
    for head in range(heads):
        for first in range(0, rows, LANES):
            lanes = min(LANES, rows - first)
            spots[:] = 0
            for lane in range(lanes):
                for d in range(dim):
                    turned[d] = queries[head, first + lane, d] / balance[head, d]
                hadamard(turned)
                steps[lane] = _rounded(turned, lane, spots)
            _sums_of_bytes(spots, sums)
            _logits(words[head], sums, steps, sizes[head], lanes, lines)
            for lane in range(lanes):
                line = lines[lane]
                top, whole = highest(line), np.float32(0)
                for i in range(used):
                    line[i] = _exp(line[i] - top)
                    whole += line[i]
                share = np.float32(1) / (whole * np.float32(rows))
                for i in range(used):
                    scores[head, i] += line[i] * share
    return scores


@jitted
def add(keys, mean, balance, words, sizes, used):
    """Append keys `(heads, n, dim)` float32 to an index; the others are as for `search`."""
    heads, new, dim = keys.shape
    count = words.shape[2]
    turned = np.empty(dim, np.float32)
    for head in range(heads):
        for i in range(new):
            for d in range(dim):
                turned[d] = (keys[head, i, d] - mean[head, d]) * balance[head, d]
            hadamard(turned)
            words[head, used + i] = 0
            size = np.float32(0)
            for d in range(dim):
                size += abs(turned[d])
                spot = _spot(d, count)
                bit = np.uint64(turned[d] > 0) << np.uint64(spot % 64)
                words[head, used + i, spot // 64] |= bit
            sizes[head, used + i] = size / np.float32(dim)
