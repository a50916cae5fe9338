"""How far one distribution is from another, and where attention fell: loops over lists."""

from collections.abc import Sequence
from math import exp, log


def recall(
    attention: Sequence[Sequence[Sequence[float]]],
    kept: Sequence[Sequence[int]],
    seen: int,
) -> float:
    """Share of what the rows from `seen` on pay to the entries before it that falls on those kept,
    mean over query heads.

    Args:
        attention: probabilities by query head, row and column.
        kept: columns that each KV head kept.
    """
    group = len(attention) // len(kept)
    shares = []
    for head, rows in enumerate(attention):
        inside = whole = 0.0
        for row in rows[seen:]:
            for column in range(seen):
                whole += row[column]
                if column in kept[head // group]:
                    inside += row[column]
        shares.append(inside / whole)
    return sum(shares) / len(shares)


def distances(
    full: Sequence[Sequence[float]], other: Sequence[Sequence[float]], text: Sequence[int]
) -> tuple[float, float, float]:
    """Means of KL(full || other), of equal likeliest tokens, and of the rise of the text's own
    negative log-likelihood.

    Args:
        full, other: logits, from which each token of `text` would have been drawn.
    """
    kl = same = rise = 0.0
    for f, o, token in zip(full, other, text, strict=True):
        p, q = _log_probabilities(f), _log_probabilities(o)
        kl += sum(exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        same += p.index(max(p)) == q.index(max(q))
        rise += p[token] - q[token]
    count = len(text)
    return kl / count, same / count, rise / count


def _log_probabilities(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = log(sum(exp(each - top) for each in logits)) + top
    return [each - total for each in logits]
