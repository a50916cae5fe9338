"""Effective rank, groups and sizes of UNComp, with loops and a singular value decomposition.

Source: "UNComp: Can Matrix Entropy Uncover Sparsity?", sections 3.1 to 3.3, Eq. 1 to 14.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def truncated_rank(vectors: ArrayLike, count: int) -> float:
    """exp(-sum s log s) over the `count` largest eigenvalues s of the mean outer product of
    centered vectors of length one."""
    rows = np.asarray(vectors, dtype=np.float64)
    centre = np.array([math.fsum(column) / len(rows) for column in rows.T])
    unit = [row - centre for row in rows]
    unit = [row / math.sqrt(float(row @ row)) for row in unit]
    covariance = np.zeros((rows.shape[1], rows.shape[1]))
    for row in unit:
        covariance += np.outer(row, row) / len(unit)
    values = sorted(np.linalg.svd(covariance, compute_uv=False), reverse=True)
    return math.exp(-math.fsum(s * math.log(s) for s in values[:count] if s > 1e-12))


def sizes(heads_in_group: Sequence[int], average: float, low: float | None) -> list[float]:
    """Entries of each group of heads: falling evenly to `low` (None: to half of the first), with
    the mean over heads `average`. Found by halving an interval, not by the formula."""
    groups = len(heads_in_group)

    def line(first: float) -> list[float]:
        last = first / 2 if low is None else low
        return [first - (first - last) * g / (groups - 1) for g in range(groups)]

    def mean(first: float) -> float:
        entries = zip(line(first), heads_in_group, strict=True)
        return math.fsum(size * heads for size, heads in entries) / sum(heads_in_group)

    below, above = 0.0, 1e7
    for _ in range(200):
        middle = (below + above) / 2
        below, above = (middle, above) if mean(middle) < average else (below, middle)
    return line(above)


def going(
    weights: ArrayLike, rows: int, width: int, last: int, row_weights: Sequence[float], sinks: int
) -> list[int]:
    """Tokens that go on to the next layer: `sinks` first ones, the `last`, and of the others those
    that the last `rows` tokens attend to most, added up over heads.

    Args:
        weights: `(query heads, n, n)`, of one layer over the tokens it was given.
    """
    a = np.asarray(weights, dtype=np.float64)
    heads, n, _ = a.shape
    older = n - last
    votes = []
    for token in range(older):
        vote = 0.0
        for head in range(heads):
            for row, weight in zip(range(n - rows, n), row_weights, strict=True):
                vote += float(a[head, row, token]) * weight
        votes.append(math.inf if token < sinks else vote)
    best = sorted(range(older), key=lambda token: (-votes[token], token))[: width - last]
    return sorted(best) + list(range(older, n))
