"""Heads that compete for entries: each gets as many as it has among the best of all."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


def compete(scores: Sequence[Tensor], total: int, sure: int) -> list[list[int]]:
    """How many of its best entries each head keeps, if the best of all heads stay.

    Heads of a batch are counted together: a head's k-th best score is the mean over sequences.

    Source: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference", algorithm 1, with a floor as in section 3.4.

    Args:
        scores: of each bank, `(batch, heads, candidates)`.
        total: entries to keep, all heads together.
        sure: entries every head keeps, or all of its candidates if it has fewer.

    Returns:
        A count for each head of each bank; they sum to `total`, or to all there is.
    """
    falling = [each.sort(dim=-1, descending=True).values.mean(0) for each in scores]
    kept = [min(sure, each.shape[1]) for each in falling]
    certain = sum(count * each.shape[0] for count, each in zip(kept, falling, strict=True))
    rest = [each[:, count:] for count, each in zip(kept, falling, strict=True)]
    pooled = torch.cat([each.flatten() for each in rest])
    wanted = max(0, min(total - certain, pooled.numel()))
    won = torch.zeros_like(pooled, dtype=torch.int64)
    won[pooled.sort(descending=True, stable=True).indices[:wanted]] = 1
    parts = won.split([each.numel() for each in rest])
    return [
        (part.view(each.shape).sum(1) + count).tolist()
        for part, each, count in zip(parts, rest, kept, strict=True)
    ]


def alike(counts: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Heads with the same count, together: (count, heads), by rising count."""
    order = sorted(range(len(counts)), key=lambda head: counts[head])
    groups = groupby(order, key=lambda head: counts[head])
    return [(count, tuple(heads)) for count, heads in groups]
