"""Which entries one token should bring back, an entry at a time, in float64."""

from collections.abc import Sequence

import numpy as np

from .attention import FloatArray


def attention(queries: FloatArray, keys: FloatArray) -> FloatArray:
    """What each entry gets of a KV head's queries `(rows, dim)`, on average: `(n,)`."""
    paid = np.zeros(len(keys))
    for query in queries:
        logits = np.array([float(query @ key) for key in keys])
        weights = np.exp(logits - logits.max())
        paid += weights / weights.sum() / len(queries)
    return paid


def wanted(
    queries: FloatArray,
    keys: FloatArray,
    rough: FloatArray,
    *,
    count: int,
    candidates: int,
    first: int,
    recent: int,
) -> set[int]:
    """The first and the recent ones, and of the candidates that look best roughly, those that get
    most attention."""
    n = len(keys)
    always = {i for i in range(n) if i < first or i >= n - recent}
    others = sorted(set(range(n)) - always, key=lambda i: -rough[i])
    named = sorted(always | set(others[: candidates - len(always)]))
    paid = dict(zip(named, attention(queries, keys[named]), strict=True))
    best = sorted(set(named) - always, key=lambda i: -paid[i])
    return always | set(best[: count - len(always)])


def swapped(held: set[int], wanted: set[int], rough: FloatArray) -> set[int]:
    """What a head group then holds: as much as before, what is wanted, and of the rest what looks
    best roughly."""
    others = sorted(held - wanted, key=lambda i: -rough[i])
    return wanted | set(others[: len(held) - len(wanted)])


def lines_after(
    lines: Sequence[set[int]],
    heads: Sequence[int],
    queries: FloatArray,
    keys: FloatArray,
    rough: FloatArray,
    **limits: int,
) -> list[set[int]]:
    """What each line of a head group holds once it was swapped for one token.

    Args:
        lines: what they held.
        heads: the KV heads they are of.
        queries: of these heads, `(lines, rows, dim)`.
        keys, rough: of all KV heads, `(heads, n, dim)` and `(heads, n)`.
        limits: as for `wanted`.
    """
    return [
        swapped(line, wanted(own, keys[head], rough[head], **limits), rough[head])
        for line, head, own in zip(lines, heads, queries, strict=True)
    ]


def expected_attention(
    turned: FloatArray, signs: np.ndarray, sizes: np.ndarray, used: int
) -> FloatArray:
    """What signs `(batch, heads, capacity, bytes)`, a bit a channel, say of the attention that
    queries `(batch, heads, rows, dim)` pay to each entry: `(batch, heads, used)`."""
    batch, heads, _, dim = turned.shape
    width = signs.shape[3]
    found = np.zeros((batch, heads, used))
    for at in np.ndindex(batch, heads):
        channels = np.zeros((used, dim))
        for entry in range(used):
            for channel in range(dim):
                byte = int(signs[at][entry, channel % width])
                positive = byte >> channel // width & 1
                size = float(sizes[at][entry])
                channels[entry, channel] = size if positive else -size
        found[at] = attention(turned[at].astype(np.float64), channels)
    return found
