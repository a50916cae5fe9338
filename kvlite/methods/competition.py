"""Heads that compete for entries, and layers that share the budget by their scores."""

from collections.abc import Callable, Sequence

from kvlite.methods.allocation import LayerLine, largest_remainder
from kvlite.methods.select import between, select_counts, to_choose
from kvlite.methods.types import KVHeadGroup, LayerCache, Selection, Tensor


def compete(scores: Sequence[Tensor], total: int, guaranteed: int) -> list[list[int]]:
    """How many of its best entries each head keeps, if the best of all heads stay.

    Heads of a batch are counted together: a head's k-th best score is the mean over sequences.

    Source: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference", algorithm 1, with a floor as in section 3.4.

    Args:
        scores: of each head group, `(batch, heads, candidates)`.
        total: entries to keep, all heads together.
        guaranteed: entries every head keeps, or all of its candidates if it has fewer.

    Returns:
        A count for each head of each head group; they sum to `total`, or to all there is.
    """
    import torch

    place = scores[0].device  # layers may be on several
    falling = [each.sort(dim=-1, descending=True).values.mean(0).to(place) for each in scores]
    kept = [min(guaranteed, each.shape[1]) for each in falling]
    certain = sum(count * each.shape[0] for count, each in zip(kept, falling, strict=True))
    rest = [each[:, count:] for count, each in zip(kept, falling, strict=True)]
    pooled = torch.cat([each.flatten() for each in rest])
    wanted = max(0, min(total - certain, pooled.numel()))
    taken = torch.zeros_like(pooled, dtype=torch.int64)
    taken[pooled.sort(descending=True, stable=True).indices[:wanted]] = 1
    parts = taken.split([each.numel() for each in rest])
    if pooled.is_meta:  # nobody wins: only memory is asked for
        heads = sum(each.shape[0] for each in rest)
        return [[count + wanted // heads] * len(e) for count, e in zip(kept, rest, strict=True)]
    return [
        (part.view(each.shape).sum(1) + count).tolist()
        for part, each, count in zip(parts, rest, kept, strict=True)
    ]


def share_by_scores(
    kind: LayerLine,
    layers: Sequence[LayerCache],
    average: int,
    *,
    first: int,
    last: int,
    floor: float,
    per_head: bool,
) -> list[list[Selection]]:
    """What each layer keeps once all are read: all heads of all layers compete ("global"), or each
    layer gets a share by how its scores are spread ("entropy", "gini").

    Args:
        average: mean entries a KV head and layer.
        first, last: entries at the ends of a head that stay.
        floor: the share of an equal head's choice that every head is guaranteed.
        per_head: a layer's heads compete for its share.
    """
    chosen = average - first - last
    guaranteed = int(floor * chosen)
    scores = [
        [between(_scores(head_group), first, last) for head_group in layer.head_groups]
        for layer in layers
    ]
    if kind == "global":
        head_groups = [head_group for layer in layers for head_group in layer.head_groups]
        total = to_choose(head_groups, average, first, last)
        found = iter(compete([each for layer in scores for each in layer], total, guaranteed))
        counts = [[next(found) for _ in layer] for layer in scores]
    else:
        lines = _by_spread(scores, kind, chosen, max(1, guaranteed))
        counts = [
            compete(
                each, line * sum(part.shape[1] for part in each), guaranteed if per_head else line
            )
            for each, line in zip(scores, lines, strict=True)
        ]
    return [
        select_counts(layer.head_groups, each, count, first, last)
        for layer, each, count in zip(layers, scores, counts, strict=True)
    ]


def _scores(head_group: KVHeadGroup) -> Tensor:
    assert head_group.selection_scores is not None
    return head_group.selection_scores


def _by_spread(
    scores: Sequence[Sequence[Tensor]], kind: str, average: int, least: int
) -> list[int]:
    """Each layer's budget, in proportion to the spread of its scores.

    Source: "PyramidKV", section 6.5: layers with higher entropy, or a higher Gini coefficient,
    get more. The paper takes all attention, kvlite the scores of a layer's candidates.

    Args:
        scores: of each head group of each layer, `(batch, heads, candidates)`.
        average: mean budget.
        least: the smallest budget.

    Returns:
        Entries a head of each layer; they sum to `average * layers`, or to all candidates.
    """
    sizes = [[(each.shape[1], each.shape[2]) for each in layer] for layer in scores]
    weights = [
        sum(SPREAD[kind](each) * heads for each, (heads, _) in zip(layer, size, strict=True))
        / sum(heads for heads, _ in size)
        for layer, size in zip(scores, sizes, strict=True)
    ]
    total, most = average * len(scores), min(max(n for _, n in layer) for layer in sizes)
    ideal = [total * weight / (sum(weights) or 1.0) for weight in weights]
    return largest_remainder(ideal, total, min(least, most), most)


def entropy(scores: Tensor) -> float:
    """Nats of scores `(batch, heads, candidates)` as a distribution over candidates; the mean over
    a batch and heads."""
    import torch

    share = scores / scores.sum(-1, keepdim=True).clamp(min=1e-30)
    return float(-torch.special.xlogy(share, share).sum(-1).mean())


def gini(scores: Tensor) -> float:
    """Gini coefficient of scores `(batch, heads, candidates)`, 0 if all are alike; the mean over a
    batch and heads."""
    import torch

    count = scores.shape[-1]
    rank = torch.arange(1, count + 1, device=scores.device)
    weighed = (scores.sort(-1).values * (2 * rank - count - 1)).sum(-1)
    return float((weighed / (count * scores.sum(-1)).clamp(min=1e-30)).mean())


SPREAD: dict[str, Callable[["Tensor"], float]] = {"entropy": entropy, "gini": gini}
