"""Which entries a model looks at when it repeats what it read, written out with loops.

Source: "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", section 3: of the
attention of each row of a repetition, the part that falls on the first entries, on the passage that
it repeats and on the repetition's own rows so far counts, and sums to one; an entry's score is the
highest of any row and any query head that reads its KV head.
"""

import numpy as np
from numpy.typing import ArrayLike

from .attention import FloatArray


def repetition_scores(
    attention: ArrayLike, read: int, span: tuple[int, int], sinks: int, kv_heads: int
) -> FloatArray:
    """Scores `(kv_heads, passage)` of the entries at positions `span`.

    Args:
        attention: `(query heads, rows, read + rows)`, of the rows of a repetition over all that
            was read and themselves; each sums to 1, or less where the model has learned sinks.
        read: how many tokens were read before the repetition.
        sinks: first entries that count.
    """
    weights = np.asarray(attention, np.float64)
    heads, rows, columns = weights.shape
    first, end = span
    counted = [j for j in range(columns) if j < min(sinks, first) or first <= j < end or j >= read]
    scores = np.zeros((kv_heads, end - first))
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        for row in range(rows):
            # What a row does not pay to entries goes to a learned sink, which counts.
            rest = max(0.0, 1 - weights[head, row].sum())
            total = sum(weights[head, row, j] for j in counted) + rest
            for j in range(first, end):
                share = weights[head, row, j] / total
                scores[kv_head, j - first] = max(scores[kv_head, j - first], share)
    return scores
