"""The largest of many numbers, found by one program of a kernel, a bit at a time: each pass counts
how many reach a bound."""

import triton
import triton.language as tl


@triton.jit
def ranked(numbers, count, k, BLOCK: tl.constexpr):
    """The k-th largest of so many numbers, none of them negative; 0 if there are fewer."""
    found = 0
    for bit in range(31):
        tried = found | (1 << (30 - bit))
        reach = 0
        for at in range(0, count, BLOCK):
            each = at + tl.arange(0, BLOCK)
            number = tl.load(numbers + each, mask=each < count, other=-1)
            reach += tl.sum((number >= tried).to(tl.int32), 0)
        found = tl.where(reach >= k, tried, found)
    return found


@triton.jit
def largest(numbers, count, k, chosen, BLOCK: tl.constexpr):
    """Write where the k largest of so many numbers are, ascending; of those alike the first."""
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
        alike = (number == bound).to(tl.int32)
        takes = (number > bound) | ((alike > 0) & (tl.cumsum(alike, 0) <= left))
        rank = taken + tl.cumsum(takes.to(tl.int32), 0) - 1
        tl.store(chosen + rank, each, mask=takes)
        taken += tl.sum(takes.to(tl.int32), 0)
        left -= tl.sum(alike, 0)
    tl.debug_barrier()


@triton.jit
def ascending(scores):
    """Numbers that are ordered as scores from 0 on, as whole ones; what is no number is as 0."""
    return tl.where(scores > 0, scores, 0.0).to(tl.int32, bitcast=True)
