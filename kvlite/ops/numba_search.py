"""Recall's index on a CPU, compiled by numba: a token's search, and the answer's own keys.

`kvlite.offload.kv.index` does the same with torch's functions, of which each costs as much as all
of this does, on so little.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_vectors import hadamard, highest

# Channels of a query are rounded to whole steps from 0 to the last, numbers of so many bits.
LAST_STEP, STEP_BITS = 15, 4
# Entries whose sums lie in the nearest cache.
PART = 1024


@intrinsic
def _ones(context, number):
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
def _quantized(query, planes):
    # Into planes `(words, STEP_BITS)` uint64 go all channels' bits; returns the size of a step, the
    # least channel, and the sum of all.
    low, high, total = query[0], query[0], np.float32(0)
    for d in range(query.size):
        low, high = min(low, query[d]), max(high, query[d])
        total += query[d]
    step = (high - low) / np.float32(LAST_STEP) + np.float32(1e-30)
    planes[:] = 0
    for d in range(query.size):
        level = np.uint64(int((query[d] - low) / step + np.float32(0.5)))
        spot = _spot(d, planes.shape[0])
        for bit in range(STEP_BITS):
            own = level >> np.uint64(bit) & np.uint64(1)
            planes[spot // 64, bit] |= own << np.uint64(spot % 64)
    return step, low, total


@jitted
def _add_steps(words, planes, levels):
    one, two, four, eight = planes[0], planes[1], planes[2], planes[3]
    for i in range(levels.size):
        word = words[i]
        level = _ones(word & one) + (_ones(word & two) << np.uint64(1))
        level += (_ones(word & four) << np.uint64(2)) + (_ones(word & eight) << np.uint64(3))
        levels[i] += np.int32(level)


@jitted
def _logits(words, planes, steps, sizes, out):
    # words `(capacity, count)` uint64; planes `(rows, count, STEP_BITS)` and steps `(rows, 3)` as
    # `_quantized` makes them.
    rows, used = out.shape
    column, ones = np.empty(PART, np.uint64), np.empty(PART, np.int32)
    levels = np.empty((rows, PART), np.int32)
    for start in range(0, used, PART):
        some = min(PART, used - start)
        part, near, own = words[start : start + some], sizes[start : start + some], column[:some]
        ones[:], levels[:] = 0, 0
        for w in range(words.shape[1]):
            for i in range(some):
                own[i] = part[i, w]
            for i in range(some):
                ones[i] += np.int32(_ones(own[i]))
            for row in range(rows):
                _add_steps(own, planes[row, w], levels[row, :some])
        for row in range(rows):
            slope, shift = np.float32(2) * steps[row, 0], np.float32(2) * steps[row, 1]
            total, level, line = steps[row, 2], levels[row], out[row, start : start + some]
            for i in range(some):
                signed = slope * np.float32(level[i]) + shift * np.float32(ones[i]) - total
                line[i] = signed * near[i]


@jitted
def search(queries, balance, words, sizes, used, entries):
    """Roughly the attention that every entry gets, the mean of a head's rows.

    A query is rounded to 16 steps, so that its product with signs is counted in bits: as in
    "RaBitQ: Quantizing High-Dimensional Vectors with a Theoretical Error Bound for Approximate
    Nearest Neighbor Search", section 3.3.

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
    planes, turned = np.empty((rows, count, STEP_BITS), np.uint64), np.empty(dim, np.float32)
    lines, steps = np.empty((rows, used), np.float32), np.empty((rows, 3), np.float32)
    for head in range(heads):
        for row in range(rows):
            for d in range(dim):
                turned[d] = queries[head, row, d] / balance[head, d]
            hadamard(turned)
            steps[row, 0], steps[row, 1], steps[row, 2] = _quantized(turned, planes[row])
        _logits(words[head], planes, steps, sizes[head], lines)
        for row in range(rows):
            line = lines[row]
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
