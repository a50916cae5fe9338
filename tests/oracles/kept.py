"""What is held, by loops over lists: for each layer a set of positions a KV head."""

from collections.abc import Sequence

Held = Sequence[Sequence[set[int]]]


def per_cent(count: int, pairs: int) -> int:
    """Whole per cent; what is something is never 0, what is not all never 100."""
    if count == 0:
        return 0
    if count == pairs:
        return 100
    return min(99, max(1, round(100 * count / pairs)))


def came_back(before: Sequence[set[int]], after: Sequence[set[int]], read: int) -> list[set[int]]:
    """Of each head, what is there now and was not, though it had been read."""
    return [
        {at for at in now if at < read and at not in then}
        for then, now in zip(before, after, strict=True)
    ]


def binned(held: Sequence[set[int]], heads: int, seen: int, bins: int) -> list[int]:
    """Per cent of each bin's pairs, where position p lies in the last bin that begins at p or
    before it."""
    begins = [number * seen // bins for number in range(bins)]
    counts, sizes = [0] * bins, [0] * bins
    for at in range(seen):
        number = max(each for each in range(bins) if begins[each] <= at)
        sizes[number] += heads
        counts[number] += sum(at in head for head in held)
    return [per_cent(count, size) for count, size in zip(counts, sizes, strict=True)]
