"""A text read chunk by chunk, each looking at columns of what lies before it, written with loops.

Source: "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse
Attention", section 3.2 (columns chosen by the last queries), as kvlite's `minference` documents
it: a chunk of L rows after N entries sees the last `near` of these, itself causally, and of the
rest the `count` columns with the most attention from its last `observed` rows, added up over rows
and over the query heads of a KV head; the first `sinks` count as most, ties go to the earlier. A
chunk with no more columns to choose from, or no more rows than vote, sees everything.
"""

import numpy as np
from numpy.typing import ArrayLike

from .attention import FloatArray, softmax_over


def read_by_columns(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    scale: float,
    chunk: int,
    count: int,
    near: int,
    observed: int,
    sinks: int,
    learned: ArrayLike,
) -> FloatArray:
    """Attention output `(Hq, n, d)` of all n tokens.

    Args:
        learned: `(Hq,)`, sinks with a share and no value; -inf for none.
        queries: `(Hq, n, d)`.
        keys, values: `(Hkv, n, d)`; query head h reads KV head h // (Hq // Hkv).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (queries, keys, values))
    taking = np.asarray(learned, np.float64)
    (heads, n, _), kv_heads = q.shape, k.shape[0]
    group, out = heads // kv_heads, np.zeros_like(q)
    for start in range(0, n, chunk):
        end = min(start + chunk, n)
        far = start - near
        for kv_head in range(kv_heads):
            members = range(kv_head * group, (kv_head + 1) * group)
            columns = list(range(max(0, far)))
            if far > count and end - start > observed:
                votes = [0.0] * far
                for head in members:
                    for row in range(end - observed, end):
                        seen = {
                            j: scale * float(q[head, row] @ k[kv_head, j]) for j in range(row + 1)
                        }
                        for j, weight in softmax_over(seen, taking[head]).items():
                            if j < far:
                                votes[j] += weight
                order = sorted(range(far), key=lambda j: (j >= sinks, -votes[j], j))
                columns = sorted(order[:count])
            for head in members:
                for row in range(start, end):
                    visible = [*columns, *range(max(0, far), row + 1)]
                    logits = {j: scale * float(q[head, row] @ k[kv_head, j]) for j in visible}
                    for j, weight in softmax_over(logits, taking[head]).items():
                        out[head, row] += weight * v[kv_head, j]
    return out
