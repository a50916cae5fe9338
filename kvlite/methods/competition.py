"""Heads that compete for entries, and layers that get a share by how their votes are spread."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvlite.methods.allocation import largest_remainder

if TYPE_CHECKING:
    from torch import Tensor


def compete(scores: "Sequence[Tensor]", total: int, sure: int) -> list[list[int]]:
    """How many of its best entries each head keeps, if the best of all heads stay.

    Heads of a batch are counted together: a head's k-th best score is the mean over sequences.

    Source: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference", algorithm 1, with a floor as in section 3.4.

    Args:
        scores: of each head group, `(batch, heads, candidates)`.
        total: entries to keep, all heads together.
        sure: entries every head keeps, or all of its candidates if it has fewer.

    Returns:
        A count for each head of each head group; they sum to `total`, or to all there is.
    """
    import torch

    falling = [each.sort(dim=-1, descending=True).values.mean(0) for each in scores]
    kept = [min(sure, each.shape[1]) for each in falling]
    certain = sum(count * each.shape[0] for count, each in zip(kept, falling, strict=True))
    rest = [each[:, count:] for count, each in zip(kept, falling, strict=True)]
    pooled = torch.cat([each.flatten() for each in rest])
    wanted = max(0, min(total - certain, pooled.numel()))
    won = torch.zeros_like(pooled, dtype=torch.int64)
    won[pooled.sort(descending=True, stable=True).indices[:wanted]] = 1
    parts = won.split([each.numel() for each in rest])
    if pooled.is_meta:  # nobody wins: only memory is asked for
        heads = sum(each.shape[0] for each in rest)
        return [[count + wanted // heads] * len(e) for count, e in zip(kept, rest, strict=True)]
    return [
        (part.view(each.shape).sum(1) + count).tolist()
        for part, each, count in zip(parts, rest, kept, strict=True)
    ]


def compete_everywhere(
    scores: "Sequence[Sequence[Tensor]]", total: int, sure: int
) -> list[list[list[int]]]:
    """As `compete`, over the heads of all layers: a count for each head of each layer's head
    groups."""
    counts = iter(compete([head_group for layer in scores for head_group in layer], total, sure))
    return [[next(counts) for _ in layer] for layer in scores]


def alike(counts: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Heads with the same count, together: (count, heads), by rising count."""
    order = sorted(range(len(counts)), key=lambda head: counts[head])
    groups = groupby(order, key=lambda head: counts[head])
    return [(count, tuple(heads)) for count, heads in groups]


def entropy(votes: "Tensor") -> float:
    """Nats of votes as a distribution over candidates, mean over a batch and heads.

    Args:
        votes: `(batch, heads, candidates)`.
    """
    import torch

    share = votes / votes.sum(-1, keepdim=True).clamp(min=1e-30)
    return float(-torch.special.xlogy(share, share).sum(-1).mean())


def gini(votes: "Tensor") -> float:
    """Gini coefficient of votes over candidates, 0 if all are alike, mean over a batch and heads.

    Args:
        votes: `(batch, heads, candidates)`.
    """
    import torch

    count = votes.shape[-1]
    rank = torch.arange(1, count + 1, device=votes.device)
    weighed = (votes.sort(-1).values * (2 * rank - count - 1)).sum(-1)
    return float((weighed / (count * votes.sum(-1)).clamp(min=1e-30)).mean())


SPREAD: dict[str, Callable[["Tensor"], float]] = {"entropy": entropy, "gini": gini}


def by_spread(
    votes: "Sequence[Sequence[Tensor]]", kind: str, average: int, least: int
) -> list[int]:
    """Lines of each layer in proportion to the spread of its votes.

    Source: "PyramidKV", section 6.5: layers with higher entropy, or a higher Gini coefficient,
    get more. There over all attention, here over the votes for what a layer was provided with.

    Args:
        votes: of each head group of each layer, `(batch, heads, candidates)`.
        kind: "entropy" or "gini".
        average: mean of the lines.
        least: the shortest line.

    Returns:
        Entries of each layer's lines; they sum to `average * layers`, or to all there is.
    """
    sizes = [[(each.shape[1], each.shape[2]) for each in layer] for layer in votes]
    weights = [
        sum(SPREAD[kind](each) * heads for each, (heads, _) in zip(layer, size, strict=True))
        / sum(heads for heads, _ in size)
        for layer, size in zip(votes, sizes, strict=True)
    ]
    total, most = average * len(votes), min(max(n for _, n in layer) for layer in sizes)
    ideal = [total * weight / (sum(weights) or 1.0) for weight in weights]
    return largest_remainder(ideal, total, min(least, most), most)
