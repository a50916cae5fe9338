"""What queries to come are expected to look at, written out with loops.

Source: "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution", section 3: queries are Gaussian, with the mean and covariance of those read and the
mean rotation of the next positions; the mean of exp(q k) over such queries is
exp(k mean + k' covariance k / 2).

Shapes, one sequence: queries (Hq, n, d), not rotated; keys and values (Hkv, N, d), keys as cached,
both without the sinks; cos and sin (F, r), one row a position to come, r <= d. Query head h reads
KV head h // (Hq // Hkv).
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from .attention import FloatArray, softmax_over


def rotation_matrix(cos: FloatArray, sin: FloatArray, size: int) -> FloatArray:
    """The rotation of one position as a matrix (size, size)."""
    matrix, half = np.eye(size), len(cos) // 2
    for c in range(half):
        matrix[c, c], matrix[c, half + c] = cos[c], -sin[c]
        matrix[half + c, half + c], matrix[half + c, c] = cos[half + c], sin[half + c]
    return matrix


def expected_scores(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    scale: float,
    use_covariance: bool = True,
    use_values: bool = True,
) -> FloatArray:
    """How much each entry matters, (Hkv, N)."""
    q, k, v, cosines, sines = (np.asarray(x, np.float64) for x in (queries, keys, values, cos, sin))
    (heads, count, size), (kv_heads, entries, _) = q.shape, k.shape
    turn = sum(
        (rotation_matrix(c, s, size) for c, s in zip(cosines, sines, strict=True)),
        np.zeros((size, size)),
    ) / len(cosines)
    scores = np.zeros((kv_heads, entries))
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        mean = sum(q[head]) / count
        covariance = np.zeros((size, size))
        for row in q[head]:
            covariance += np.outer(row - mean, row - mean) / count
        mean, covariance = turn @ mean, turn @ covariance @ turn.T
        logits = {}
        for entry in range(entries):
            key = k[kv_head, entry] * scale
            logits[entry] = float(key @ mean)
            if use_covariance:
                logits[entry] += float(key @ covariance @ key) / 2
        for entry, weight in softmax_over(logits).items():
            scores[kv_head, entry] += weight * kv_heads / heads
    for kv_head in range(kv_heads):
        for entry in range(entries):
            if use_values:
                scores[kv_head, entry] *= math.sqrt(sum(x * x for x in v[kv_head, entry]))
    return scores
