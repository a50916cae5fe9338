"""Dense causal attention over an arbitrary set of cached keys, written out with loops.

Source: "PyramidKV", section 4.2.2, Eq. 2 (A = softmax(Q K^T / sqrt(d))) and "KV-X", section 3.2,
Eq. 3, which print the same formula. Causality is by *position*, not by slot: keys carry the
position they were stored with (already inside their rotary encoding), slots may have any order.

Shapes, one sequence at a time:
    queries          (Hq, w, d)    the w query rows of every query head
    keys, values     (Hkv, n, d)   the n cached slots of every KV head
    query_positions  w integers
    key_positions    (Hkv, n) integers, since heads may have kept different tokens
Query head h reads KV head h // (Hq // Hkv).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


def kv_head_of(query_head: int, query_heads: int, kv_heads: int) -> int:
    """The KV head that a query head reads (grouped-query attention)."""
    if query_heads % kv_heads != 0:
        raise ValueError(f"{query_heads} query heads do not divide over {kv_heads} KV heads")
    return query_head // (query_heads // kv_heads)


def softmax_over(logits: dict[int, float], sink: float = -math.inf) -> dict[int, float]:
    """Softmax over the visible slots: {slot: logit} -> {slot: weight}; {} stays {}. A learned sink
    is one more logit, which gets its share and has no slot."""
    if not logits:
        return {}
    highest = max(logits.values())
    exponentials = {slot: math.exp(logit - highest) for slot, logit in logits.items()}
    total = math.fsum([*exponentials.values(), math.exp(sink - highest)])
    return {slot: exponential / total for slot, exponential in exponentials.items()}


def _weights(
    queries: ArrayLike,
    keys: ArrayLike,
    query_positions: Sequence[int],
    key_positions: ArrayLike,
    scale: float,
    allowed: Sequence[set[int]],
    softcap: float | None,
) -> FloatArray:
    """Attention weights (Hq, w, n); a slot outside `allowed[kv_head]` is invisible."""
    q = np.asarray(queries, dtype=np.float64)
    k = np.asarray(keys, dtype=np.float64)
    positions = np.asarray(key_positions)
    query_heads, rows, _ = q.shape
    kv_heads, slots, _ = k.shape
    if len(query_positions) != rows or positions.shape != (kv_heads, slots):
        raise ValueError(
            f"positions of {len(query_positions)} queries and {positions.shape} keys do not fit "
            f"queries {q.shape} and keys {k.shape}"
        )
    weights = np.zeros((query_heads, rows, slots))
    for head in range(query_heads):
        kv_head = kv_head_of(head, query_heads, kv_heads)
        for row in range(rows):
            logits: dict[int, float] = {}
            for slot in range(slots):
                in_the_past = positions[kv_head, slot] <= query_positions[row]
                if not in_the_past or slot not in allowed[kv_head]:
                    continue
                logit = float(np.dot(q[head, row], k[kv_head, slot])) * scale
                if softcap is not None:
                    logit = softcap * math.tanh(logit / softcap)
                logits[slot] = logit
            for slot, weight in softmax_over(logits).items():
                weights[head, row, slot] = weight
    return weights


def attention_rows(
    queries: ArrayLike,
    keys: ArrayLike,
    query_positions: Sequence[int],
    key_positions: ArrayLike,
    scale: float,
    softcap: float | None = None,
) -> FloatArray:
    """Attention weights (Hq, w, n) of the given query rows over all cached slots.

    A key is visible iff its position is not after the query's; an invisible key has weight 0 (a row
    that sees nothing is all zero). `softcap` c replaces a logit x by c * tanh(x / c).
    """
    kv_heads, slots, _ = np.asarray(keys).shape
    everything = [set(range(slots))] * kv_heads
    return _weights(queries, keys, query_positions, key_positions, scale, everything, softcap)


def masked_attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    query_positions: Sequence[int],
    key_positions: ArrayLike,
    scale: float,
    kept: Sequence[Sequence[int]],
    softcap: float | None = None,
) -> FloatArray:
    """Attention output (Hq, w, d) when only the slots `kept[kv_head]` exist.

    This is what a compressed cache must compute, as a mask on the full one: a dropped slot has the
    logit -inf, the rest of the softmax is renormalised.
    """
    v = np.asarray(values, dtype=np.float64)
    kv_heads, _, size = v.shape
    allowed = [set(slots) for slots in kept]
    if len(allowed) != kv_heads:
        raise ValueError(f"kept slots of {len(allowed)} heads for {kv_heads} KV heads")
    weights = _weights(queries, keys, query_positions, key_positions, scale, allowed, softcap)
    query_heads, rows, slots = weights.shape
    output = np.zeros((query_heads, rows, size))
    for head in range(query_heads):
        kv_head = kv_head_of(head, query_heads, kv_heads)
        for row in range(rows):
            for slot in range(slots):
                output[head, row] += weights[head, row, slot] * v[kv_head, slot]
    return output
