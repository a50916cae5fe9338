"""Slots of a head: its first entries, its last ones, and the best of those in between."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvlite.methods.scores import top, window_scores
from kvlite.methods.types import KVHeadGroup, Selection, Tensor

if TYPE_CHECKING:
    import torch

    from kvlite.methods.base import LayerView


def ends(
    head_group: KVHeadGroup, first: int, last: int, device: "torch.device | None" = None
) -> Tensor:
    """Slots of a head group's `first` and `last` entries: `(batch, heads, first + last)`, on the
    head group's device or another."""
    import torch

    used, device = head_group.used, device or head_group.residual_keys.device
    slots = torch.cat(
        [torch.arange(first, device=device), torch.arange(used - last, used, device=device)]
    )
    return slots.expand(*head_group.positions.shape[:2], -1)


def with_ends(scores: Tensor, head_group: KVHeadGroup, count: int, first: int, last: int) -> Tensor:
    """Slots of the `count` best entries by score, between the `first` and the `last` ones. A line
    that is no longer than these stays whole.

    Args:
        scores: `(batch, heads, used - first - last)`, of the entries in between; of all the
            head group's heads, or of some; on any device.

    Returns:
        `(batch, heads, first + count + last)` int64, ascending, on the scores' device.
    """
    import torch

    if head_group.used <= first + last:
        count, first, last = 0, head_group.used, 0
    outer = ends(head_group, first, last, scores.device)[:, : scores.shape[1]]
    middle = top(scores, count) + first
    return torch.cat([outer[..., :first], middle, outer[..., first:]], -1)


def between(scores: Tensor, first: int, last: int) -> Tensor:
    """Scores `(batch, heads, used)` of the entries between a line's ends, if there are any."""
    return scores[..., first : max(first, scores.shape[-1] - last)]


def to_choose(head_groups: Sequence[KVHeadGroup], average: int, first: int, last: int) -> int:
    """How many entries heads that may keep `average` choose beside the ends of their lines, all
    together."""
    return sum(
        len(head_group.heads) * (average - min(head_group.used, first + last))
        for head_group in head_groups
    )


def candidates(
    scores: Tensor, head_group: KVHeadGroup, count: int, first: int, last: int
) -> Selection:
    """`count` entries of each line, ends included, and their scores, until layers share."""
    import torch
    import torch.nn.functional as F

    from kvlite.cache import Selection

    slots = with_ends(scores, head_group, count - first - last, first, last)
    scores = F.pad(scores, (first, last), value=torch.inf)
    return Selection(head_group, slots, selection_scores=scores.gather(-1, slots))


def select_counts(
    head_groups: Sequence[KVHeadGroup],
    scores: Sequence[Tensor],
    counts: Sequence[Sequence[int]],
    first: int,
    last: int,
) -> list[Selection]:
    """What heads keep that chose different numbers of entries between their ends.

    Args:
        scores: of each head group, as for `with_ends`.
        counts: of each head group's heads.
    """
    from kvlite.cache import Selection
    from kvlite.ops.heads import of_heads

    return [
        Selection(
            head_group, with_ends(of_heads(each, heads), head_group, count, first, last), heads
        )
        for head_group, each, own in zip(head_groups, scores, counts, strict=True)
        for count, heads in alike(own)
    ]


def alike(counts: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Heads with the same count, together: (count, heads), by rising count."""
    order = sorted(range(len(counts)), key=lambda head: counts[head])
    groups = groupby(order, key=lambda head: counts[head])
    return [(count, tuple(heads)) for count, heads in groups]


def attended_tokens(
    view: "LayerView", through: int, width: int, sinks: int = 0, weights: "Tensor | None" = None
) -> Tensor:
    """Which tokens go on into the next layer: those of the window, the first `sinks` positions, and
    the ones that the window attends to most, added up over heads and the sequences of a batch.

    Args:
        through: how many tokens went through the layer, the last entries of its head groups.
        width: how many go on.
        weights: `(rows,)` float32, how much each row of the window counts.

    Returns:
        Their indices `(width,)` int64, ascending, counted from the first of those tokens.
    """
    import torch

    window = view.window
    last = window.queries.shape[2]
    scores = [
        window_scores(head_group, window, "sum", "sum", weights)[..., -through:]
        for head_group in view.head_groups
    ]
    votes = torch.cat(scores, 1).sum((0, 1))
    if sinks:
        head_group = view.head_groups[0]
        positions = head_group.positions[0, 0, : head_group.used][-through:]
        votes = votes.masked_fill(window.to_scoring_device(positions) < sinks, torch.inf)
    votes = window.backend.scores(votes)
    recent = torch.arange(through - last, through, device=votes.device)
    return torch.cat([top(votes[:-last], width - last), recent])
