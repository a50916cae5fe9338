"""TriAttention's scores in complex numbers, with a loop over distances.

Source: "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression", section 4: for
a query head, a pair f of channels turning with frequency w_f, and a key k,
S_trig(k, D) = sum_f |E q_f| |k_f| cos(w_f D + phi_f), phi_f = arg(E q_f) - arg(k_f), and
S_norm(k) = sum_f (E|q_f| - |E q_f|) |k_f|; the mean over distances of their sum is standardised
over keys, and the highest of a group's query heads counts.

Shapes, one sequence, not rotated: queries (Hq, n, d), keys (Hkv, N, d), positions (Hkv, N),
frequencies (r / 2), r <= d; channel c turns with channel c + r / 2. Query head h reads KV head
h // (Hq // Hkv).
"""

import cmath
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .attention import FloatArray


def pairs_of(vector: FloatArray, count: int) -> list[complex]:
    """The channels that turn, as complex numbers."""
    return [complex(vector[c], vector[c + count]) for c in range(count)]


def trigonometric_scores(
    queries: ArrayLike,
    keys: ArrayLike,
    positions: Sequence[Sequence[int]],
    frequencies: Sequence[float],
    stretch: float,
    coming: Sequence[int],
    over_heads: str = "max",
) -> FloatArray:
    """How much each key matters to queries at the positions `coming`, (Hkv, N).

    Args:
        stretch: what the model multiplies channels by that turn, queries and keys alike.
    """
    q, k = (np.asarray(x, np.float64) for x in (queries, keys))
    (heads, count, _), (kv_heads, entries, _) = q.shape, k.shape
    pairs, group = len(frequencies), heads // kv_heads
    scores = np.zeros((heads, entries))
    for head in range(heads):
        turning = [pairs_of(row, pairs) for row in q[head]]
        centers = [sum(row[f] for row in turning) / count for f in range(pairs)]
        lengths = [sum(abs(row[f]) for row in turning) / count for f in range(pairs)]
        still = q[head, :, 2 * pairs :].mean(0)
        for entry in range(entries):
            key = pairs_of(k[head // group, entry], pairs)
            total = 0.0
            for position in coming:
                distance = position - positions[head // group][entry]
                for f, frequency in enumerate(frequencies):
                    phase = cmath.phase(centers[f]) - cmath.phase(key[f])
                    cosine = math.cos(frequency * distance + phase)
                    total += abs(centers[f]) * abs(key[f]) * cosine / len(coming)
            for f in range(pairs):
                total += (lengths[f] - abs(centers[f])) * abs(key[f])
            unmoved = float(still @ k[head // group, entry, 2 * pairs :])
            scores[head, entry] = total * stretch**2 + unmoved
    for row in scores:
        row -= row.mean()
        row /= math.sqrt(float(row @ row) / entries)
    return np.array(
        [
            rows.max(0) if over_heads == "max" else rows.mean(0)
            for rows in np.split(scores, kv_heads)
        ]
    )
