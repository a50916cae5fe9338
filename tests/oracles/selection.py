"""Which cached slots each method keeps: for every KV head the slot indices, ascending.

Slots are in the order of their positions. Ties in a top-k go to the lower index. Scores are
float64; the shapes are those of `attention.py`. PyramidKV is `snapkv` with the layer's budget from
`budgets.pyramid`, so it has no function of its own.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from .attention import FloatArray, attention_rows, kv_head_of

Reduction = Literal["sum", "mean", "max"]
Pooling = Literal["max", "avg"]


def _reduce(values: Sequence[float], how: Reduction) -> float:
    if how == "sum":
        return float(sum(values))
    if how == "mean":
        return float(sum(values)) / len(values)
    if how == "max":
        return float(max(values))
    raise ValueError(f"unknown reduction {how!r}")


def _top(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` largest scores, ascending; ties go to the lower index."""
    best_first = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return sorted(best_first[: max(0, count)])


def streaming(n: int, heads: int, budget: int, sinks: int = 4) -> list[list[int]]:
    """StreamingLLM: the first `sinks` and the last `budget - sinks` slots.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks"; the baseline
    of "PyramidKV", section 5.1.3.
    """
    if n <= budget:
        return [list(range(n)) for _ in range(heads)]
    if budget < sinks:
        raise ValueError(f"a budget of {budget} does not hold {sinks} sinks")
    recent = budget - sinks
    kept = list(range(sinks)) + list(range(n - recent, n))
    return [list(kept) for _ in range(heads)]


def window_scores(
    queries: ArrayLike,
    keys: ArrayLike,
    query_positions: Sequence[int],
    key_positions: ArrayLike,
    scale: float,
    over_queries: Reduction = "sum",
    over_heads: Reduction = "mean",
    softcap: float | None = None,
) -> FloatArray:
    """How much the given query rows attend to every slot: (Hkv, n).

    Source: "PyramidKV", section 4.2.2, Eq. 3 (s_i = sum over the last alpha queries of A_ji, i the
    key); "KV-X", section 3.2, Eq. 4. Both print one head; the query heads of a KV head are reduced
    after the rows, so that a KV head has one score per slot.
    """
    weights = attention_rows(queries, keys, query_positions, key_positions, scale, softcap)
    query_heads, rows, slots = weights.shape
    kv_heads = np.asarray(keys).shape[0]
    scores = np.zeros((kv_heads, slots))
    for kv_head in range(kv_heads):
        group = [h for h in range(query_heads) if kv_head_of(h, query_heads, kv_heads) == kv_head]
        for slot in range(slots):
            per_head = [
                _reduce([float(weights[h, row, slot]) for row in range(rows)], over_queries)
                for h in group
            ]
            scores[kv_head, slot] = _reduce(per_head, over_heads)
    return scores


def pool(scores_1d: Sequence[float], kernel: int, kind: Pooling = "max") -> list[float]:
    """Pooling along the positions: stride 1, padding kernel // 2, so the length stays.

    The average counts the zero padding in its denominator, the maximum ignores it. A kernel longer
    than the line is cut to the largest odd number that fits.

    Source: "PyramidKV", section 4.2.2 ("a pooling layer", following SnapKV); the details are those
    of the released SnapKV code.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"the kernel must be odd and positive, not {kernel}")
    if kind not in ("max", "avg"):
        raise ValueError(f"unknown pooling {kind!r}")
    length = len(scores_1d)
    if length == 0:
        return []
    largest_odd = length if length % 2 == 1 else length - 1
    kernel = min(kernel, max(1, largest_odd))
    reach = kernel // 2
    pooled: list[float] = []
    for centre in range(length):
        inside = range(max(0, centre - reach), min(length, centre + reach + 1))
        near = [float(scores_1d[index]) for index in inside]
        pooled.append(max(near) if kind == "max" else sum(near) / kernel)
    return pooled


def snapkv(
    queries: ArrayLike,
    keys: ArrayLike,
    query_positions: Sequence[int],
    key_positions: ArrayLike,
    scale: float,
    budget: int,
    window: int,
    kernel: int = 7,
    kind: Pooling = "max",
    over_queries: Reduction = "sum",
    over_heads: Reduction = "mean",
    softcap: float | None = None,
) -> list[list[int]]:
    """SnapKV, and PyramidKV at the budget of its layer.

    The last `window` slots stay. Of the n - window before them stay the budget - window with the
    highest attention from the last `window` query rows, pooled over these candidates alone.
    `queries` may hold fewer rows than `window` (then all of them count) or more.

    Source: "PyramidKV", section 4.2.2, Eq. 2 and 3.
    """
    kv_heads, n, _ = np.asarray(keys).shape
    if n <= budget:
        return [list(range(n)) for _ in range(kv_heads)]
    if not budget >= window >= 1:
        raise ValueError(f"a budget of {budget} does not hold a window of {window}")
    rows = np.asarray(queries)[:, -window:]
    row_positions = list(query_positions)[-window:]
    scores = window_scores(
        rows, keys, row_positions, key_positions, scale, over_queries, over_heads, softcap
    )
    kept: list[list[int]] = []
    for kv_head in range(kv_heads):
        candidates = [float(score) for score in scores[kv_head, : n - window]]
        chosen = _top(pool(candidates, kernel, kind), budget - window)
        kept.append(chosen + list(range(n - window, n)))
    return kept


def compete(scores: Sequence[Sequence[float]], total: int, sure: int) -> list[int]:
    """How many candidates each KV head of one sequence keeps, the best of all heads one by one.

    Every head first gets its `sure` best. Ties go to the lower head.

    Source: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference", algorithm 1; the floor as in section 3.4.
    """
    falling = [sorted(line, reverse=True) for line in scores]
    kept = [min(sure, len(line)) for line in falling]
    while sum(kept) < min(total, sum(len(line) for line in falling)):
        heads = [head for head, line in enumerate(falling) if kept[head] < len(line)]
        best = max(heads, key=lambda head: (falling[head][kept[head]], -head))
        kept[best] += 1
    return kept


def competing(
    scores: FloatArray, budget: int, first: int, last: int, floor: float, kernel: int, kind: Pooling
) -> list[list[int]]:
    """Slots of every KV head when a layer's heads compete for `heads * budget` entries: the first
    and last ones, and in between what the pooled scores `(Hkv, n)` win."""
    kv_heads, n = scores.shape
    chosen = budget - first - last
    pooled = [pool([float(s) for s in line[first : n - last]], kernel, kind) for line in scores]
    counts = compete(pooled, chosen * kv_heads, int(floor * chosen))
    return [
        [*range(first), *(slot + first for slot in _top(line, count)), *range(n - last, n)]
        for line, count in zip(pooled, counts, strict=True)
    ]


def h2o(
    weights: FloatArray, held: Sequence[int], budget: int, recent: int, seen: int, norm: str
) -> list[int]:
    """Positions that one KV head keeps of those it holds.

    Args:
        weights: `(group, rows, rows)`, all attention its query heads ever paid, row by row.
        held: ascending.
        seen: tokens so far; one more than rows if the newest has not looked yet.

    Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    section 4, Definition 4.3: F_score is the accumulated attention.
    """
    if len(held) <= budget:
        return list(held)
    candidates = [position for position in held if position < seen - recent]
    heavy = []
    for position in candidates:
        total = math.fsum(float(w) for w in weights[:, :, position].flat) / weights.shape[0]
        heavy.append(total / (weights.shape[1] - position) if norm == "mean" else total)
    stays = [candidates[index] for index in _top(heavy, budget - recent)]
    return stays + [position for position in held if position >= seen - recent]


def tova(weights: FloatArray, held: Sequence[int], budget: int) -> list[int]:
    """Positions that all heads of a layer keep, by the newest row `(heads, seen)`; the newest token
    itself is kept whatever its own weight.

    Source: "Transformers are Multi-State RNNs", section 3.2.
    """
    if len(held) <= budget:
        return list(held)
    candidates = [position for position in held if position < weights.shape[1] - 1]
    means = [math.fsum(float(w) for w in weights[:, p]) / weights.shape[0] for p in candidates]
    best = [candidates[index] for index in _top(means, budget - 1)]
    return [*best, weights.shape[1] - 1]


def keydiff(keys: FloatArray, budget: int) -> list[int]:
    """Slots of one KV head, keys `(n, d)`: those least like the mean direction, and the last one.

    Source: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments", section 3: the score is -cos(k_i, mean of k_j / |k_j|).
    """
    n = len(keys)
    if n <= budget:
        return list(range(n))
    units = [key / math.sqrt(float(key @ key)) for key in keys]
    mean = sum(units) / n
    away = [-float(unit @ mean) / math.sqrt(float(mean @ mean)) for unit in units]
    return [*_top(away[: n - 1], budget - 1), n - 1]


def kvx_mask_width(budget: int, omega: int) -> int:
    """Sinks, and as many streaming slots, of a line of `budget` entries: C_l / (2 omega).

    Source: "KV-X", section 3.2, Eq. 5, with alpha = C_l. At least 1, but a line of 2m + 1 must fit
    the budget: lines of 1 or 2 entries have neither sinks nor streaming slots.
    """
    return min(max(1, budget // (2 * omega)), (budget - 1) // 2)


def _lambda_mask_and_top(
    line: Sequence[int], scores: Sequence[float], m: int, middle: int, kernel: int, kind: Pooling
) -> list[int]:
    """Of the slots in `line`: the first m, the last m, and the `middle` best between them."""
    between = list(line[m : len(line) - m])
    pooled = pool([scores[slot] for slot in between], kernel, kind)
    best = [between[index] for index in _top(pooled, middle)]
    return [*line[:m], *best, *line[len(line) - m :]]


def kvx_prefill(
    queries: ArrayLike,
    keys: ArrayLike,
    query_positions: Sequence[int],
    key_positions: ArrayLike,
    scale: float,
    budget: int,
    limit: int | None = None,
    omega: int = 4,
    middle: Literal["budget", "example"] = "budget",
    until_limit: bool = False,
    kernel: int = 1,
    kind: Pooling = "max",
    over_queries: Reduction = "sum",
    over_heads: Reduction = "mean",
    per_layer: bool = False,
    softcap: float | None = None,
) -> list[list[int]]:
    """KV-X on a line of n slots: sinks, streaming slots, and the best of the middle.

    `queries` are the last alpha rows. Nothing happens up to `limit` slots (default: the budget).

    `middle="budget"`: m = `kvx_mask_width` sinks, m streaming, the best budget - 2m between.
    Source: "KV-X", section 3.2, Eq. 4 to 7, and section 3.3, Eq. 8.

    `middle="example"`: m = n / (2 omega) of the line as it is, and m of the middle too, whatever
    the budget: 2048 slots at a mask width of 1/4 leave 256 + 256 + 256. Nothing happens if n < 3m.
    `until_limit` repeats this on what is left, with the scores it has, until the line is within the
    limit or no longer shrinks.
    Source: "KV-X", section 4 (its worked example), which contradicts Eq. 6.

    `per_layer` averages the scores over the KV heads, so that all of them keep the same slots (the
    paper prints no head index).
    """
    kv_heads, n, _ = np.asarray(keys).shape
    if limit is None:
        limit = budget
    if middle not in ("budget", "example"):
        raise ValueError(f"unknown middle {middle!r}")
    everything = list(range(n))
    if n <= limit or (middle == "budget" and n <= budget):
        return [list(everything) for _ in range(kv_heads)]

    scores = window_scores(
        queries, keys, query_positions, key_positions, scale, over_queries, over_heads, softcap
    )
    if per_layer:
        for slot in range(n):
            mean = _reduce([float(score) for score in scores[:, slot]], "mean")
            scores[:, slot] = mean

    kept: list[list[int]] = []
    for kv_head in range(kv_heads):
        own = [float(score) for score in scores[kv_head]]
        if middle == "budget":
            m = kvx_mask_width(budget, omega)
            line = _lambda_mask_and_top(everything, own, m, budget - 2 * m, kernel, kind)
        else:
            line = _example_pass(everything, own, omega, kernel, kind)
            previous = n
            while until_limit and len(line) > limit and len(line) < previous:
                previous = len(line)
                line = _example_pass(line, own, omega, kernel, kind)
        kept.append(line)
    return kept


def _example_pass(
    line: Sequence[int], scores: Sequence[float], omega: int, kernel: int, kind: Pooling
) -> list[int]:
    """One pass of the worked example in "KV-X", section 4, over the slots in `line`."""
    m = max(1, len(line) // (2 * omega))
    if len(line) < 3 * m:
        return list(line)
    return _lambda_mask_and_top(line, scores, m, min(m, len(line) - 2 * m), kernel, kind)


def kvx_victim(positions: Sequence[int], scores: Sequence[float], budget: int, omega: int) -> int:
    """The slot a full line of one KV head gives up when a new token arrives (`middle="budget"`).

    The slots may be in any order; what is a sink and what is streaming goes by position. The new
    token will be the newest of the m streaming entries, so of the old ones only m - 1 are safe. The
    candidate with the smallest score goes, ties to the smaller slot.

    Source: "KV-X", section 3.2: the lines are compressed "both in prefilling and autoregressive
    decoding phases". One entry in, one out is kvlite's form of it.
    """
    if not len(positions) == len(scores) == budget:
        raise ValueError(
            f"{len(positions)} positions and {len(scores)} scores are no full line of {budget}"
        )
    m = kvx_mask_width(budget, omega)
    oldest_first = sorted(range(budget), key=lambda slot: positions[slot])
    safe_at_the_end = max(0, m - 1)
    candidates = oldest_first[m : budget - safe_at_the_end]
    return min(candidates, key=lambda slot: (scores[slot], slot))


def uncomp_victim(
    positions: Sequence[int], scores: Sequence[float], window: int, kernel: int
) -> int:
    """The slot that a new token takes: of the entries before the last `window` tokens (the new one
    is the last of them) the one with the smallest pooled score; ties go to the earlier position.

    Source: "UNComp: Can Matrix Entropy Uncover Sparsity?", section 3.3: "the token with the
    smallest cumulative attention score is discarded"; pooling is its code's.
    """
    by_position = sorted(range(len(positions)), key=lambda slot: positions[slot])
    older = by_position[: len(by_position) - (window - 1)]
    pooled = pool([scores[slot] for slot in older], kernel)
    return older[min(range(len(older)), key=lambda index: (pooled[index], index))]
