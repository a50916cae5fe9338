"""Attention under a lambda mask, pair by pair, from queries and keys that no one has rotated.

Source: "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models", section 4:
each token sees the first few tokens and the most recent ones, and the distance at which it sees the
first ones is bounded. A pair at distance t has the logit of its query at position t and its key at
position 0, which is all that rotary positions can tell.

Where earlier turns dropped tokens, "the most recent" are counted among those that are held, and the
distance is that between the tokens' positions. The bound begins with the first token that could
not see everything if nothing had been dropped.

Shapes, one sequence at a time: queries (Hq, n, d), keys and values (Hkv, N, d), of which the last n
belong to the queries; positions N integers, ascending; cos and sin (P, r), one row a distance,
r <= d. Query head h reads KV head h // (Hq // Hkv).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .attention import FloatArray, kv_head_of, softmax_over


def rotate(vector: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """Entry c of the first half of the r turned ones goes with entry c of the second half."""
    turned = np.array(vector)
    half = len(cos) // 2
    for c in range(half):
        x, y = vector[c], vector[half + c]
        turned[c] = x * cos[c] - y * sin[c]
        turned[half + c] = y * cos[half + c] + x * sin[half + c]
    return turned


def lambda_attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    positions: Sequence[int],
    cos: ArrayLike,
    sin: ArrayLike,
    sinks: int,
    window: int,
    limit: bool,
    scale: float,
    softcap: float | None = None,
    learned: ArrayLike | None = None,
) -> FloatArray:
    """The attention output (Hq, n, d); `learned` are sinks (Hq)."""
    q, k, v, cosines, sines = (np.asarray(x, np.float64) for x in (queries, keys, values, cos, sin))
    heads, rows, _ = q.shape
    kv_heads, held, size = v.shape
    taking = np.full(heads, -np.inf) if learned is None else np.asarray(learned, np.float64)
    origin = [
        [rotate(k[head, slot], cosines[0], sines[0]) for slot in range(held)]
        for head in range(kv_heads)
    ]
    output = np.zeros((heads, rows, size))
    for row in range(rows):
        own = held - rows + row
        visible = [slot for slot in range(own + 1) if slot < sinks or own - slot < window]
        distances = {slot: positions[own] - positions[slot] for slot in visible}
        if limit and positions[own] >= sinks + window:
            distances |= {slot: window for slot in visible if slot < sinks}
        for head in range(heads):
            kv_head = kv_head_of(head, heads, kv_heads)
            asked = {
                distance: rotate(q[head, row], cosines[distance], sines[distance])
                for distance in {*distances.values()}
            }
            logits = {
                slot: float(asked[distance] @ origin[kv_head][slot]) * scale
                for slot, distance in distances.items()
            }
            if softcap is not None:
                logits = {slot: softcap * math.tanh(x / softcap) for slot, x in logits.items()}
            for slot, weight in softmax_over(logits, taking[head]).items():
                output[head, row] += weight * v[kv_head, slot]
    return output
