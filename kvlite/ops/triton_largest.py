"""The largest of many numbers, found by one program of a kernel.

Few are held in registers, and the bound is found a bit at a time. Many are read again and again,
eight bits at a time: each pass counts how many of those that are alike so far have which digit.
"""

import triton
import triton.language as tl


@triton.jit
def bound_of(number, k, BITS: tl.constexpr):
    """The k-th largest of a block's numbers, of which those that are negative do not count; 0 if
    there are fewer. With fewer than 31 bits it is rounded down, to its first ones."""
    found = 0
    for at in range(BITS):
        trial = found | (1 << (30 - at))
        found = tl.where(tl.sum((number >= trial).to(tl.int32), 0) >= k, trial, found)
    return found


@triton.jit
def ranked(numbers, count, k, BLOCK: tl.constexpr):
    """The k-th largest of so many numbers, none of them negative; 0 if there are fewer."""
    digits = tl.arange(0, 256)
    found, left = 0, k
    for place in tl.static_range(24, -1, -8):
        counts = tl.zeros((256,), tl.int32)
        for at in range(0, count, BLOCK):
            each = at + tl.arange(0, BLOCK)
            number = tl.load(numbers + each, mask=each < count, other=0)
            alike = each < count
            if place < 24:
                alike = alike & ((number >> (place + 8)) == (found >> (place + 8)))
            counts += tl.histogram((number >> place) & 255, 256, mask=alike)
        reach = tl.cumsum(counts, 0, reverse=True)
        # Where none are wanted, every digit is reached: found is the largest number there is.
        digit = tl.minimum(tl.sum((reach >= left).to(tl.int32), 0), 256 if place < 24 else 128)
        digit = tl.maximum(digit - 1, 0)
        left -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        found = found | (digit << place)
    return found


@triton.jit
def largest(numbers, count, k, chosen, BLOCK: tl.constexpr):
    """Write where the k largest of so many numbers are, ascending; of those alike the first."""
    if count <= BLOCK:
        each = tl.arange(0, BLOCK)
        number = tl.load(numbers + each, mask=each < count, other=-1)
        bound = bound_of(number, k, 31)
        left = k - tl.sum((number > bound).to(tl.int32), 0)
        _take(each, number, bound, left, 0, chosen)
    else:
        bound = ranked(numbers, count, k, BLOCK)
        left = k
        for at in range(0, count, BLOCK):
            each = at + tl.arange(0, BLOCK)
            number = tl.load(numbers + each, mask=each < count, other=-1)
            left -= tl.sum((number > bound).to(tl.int32), 0)
        taken = 0
        for at in range(0, count, BLOCK):
            each = at + tl.arange(0, BLOCK)
            number = tl.load(numbers + each, mask=each < count, other=-1)
            takes = _take(each, number, bound, left, taken, chosen)
            taken += tl.sum(takes, 0)
            left -= tl.sum((number == bound).to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def _take(each, number, bound, left, taken, chosen):
    # Of those on the bound the first few are taken; returns 1 for what is.
    alike = (number == bound).to(tl.int32)
    takes = ((number > bound) | ((alike > 0) & (tl.cumsum(alike, 0) <= left))).to(tl.int32)
    tl.store(chosen + taken + tl.cumsum(takes, 0) - 1, each, mask=takes > 0)
    return takes


@triton.jit
def ascending(scores):
    """Numbers that are ordered as scores from 0 on, as whole ones; what is no number is as 0."""
    return tl.where(scores > 0, scores, 0.0).to(tl.int32, bitcast=True)
