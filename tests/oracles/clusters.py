"""Heads clustered by where their first tokens look, with loops.

Source: "CHAI: Clustered Head Attention for Efficient LLM Inference", section 3: attention of the
first tokens, compared by cosine; clusters by average linkage. Queries of one sequence: `(heads, r,
d)`, of which row i is token `before + i`; keys `(kv heads, n, d)`, of which query head h reads
h // (heads / kv heads).
"""

import math
from itertools import combinations

from .attention import FloatArray


def looks(queries: FloatArray, keys: FloatArray, before: int, scale: float) -> list[list[float]]:
    """Of each KV head, the attention of all rows in turn, the mean over its query heads."""
    group, found = len(queries) // len(keys), []
    for head, line in enumerate(keys):
        row: list[float] = []
        for i in range(queries.shape[1]):
            visible = before + i + 1
            mean = [0.0] * (before + queries.shape[1])
            for asking in queries[head * group : (head + 1) * group]:
                weights = [math.exp(scale * float(asking[i] @ key)) for key in line[:visible]]
                for place, weight in enumerate(weights):
                    mean[place] += weight / sum(weights) / group
            row += mean
        found.append(row)
    return found


def distance(one: list[float], other: list[float]) -> float:
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return 1 - product / math.sqrt(math.fsum(a * a for a in one) * math.fsum(b * b for b in other))


def clusters(distances: list[list[float]], count: int) -> list[tuple[int, ...]]:
    """The two clusters whose members are closest on average become one, until `count` are left."""
    found: list[tuple[int, ...]] = [(head,) for head in range(len(distances))]
    while len(found) > count:

        def apart(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
            each = [distances[a][b] for a in pair[0] for b in pair[1]]
            return math.fsum(each) / len(each)

        nearest = min(combinations(found, 2), key=apart)
        joined = tuple(sorted(nearest[0] + nearest[1]))
        found = sorted([each for each in found if each not in nearest] + [joined])
    return found
