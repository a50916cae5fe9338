"""Slots of a line: its first entries, its last ones, and the best of those in between."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlite.methods.competition import alike
from kvlite.methods.scores import top

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvlite.cache import KVHeadGroup, Selection


def ends(
    head_group: "KVHeadGroup", first: int, last: int, device: "torch.device | None" = None
) -> "Tensor":
    """Slots of a head group's `first` and `last` entries: `(batch, heads, first + last)`, on the
    head group's device or another."""
    import torch

    used, device = head_group.used, device or head_group.residual_keys.device
    slots = torch.cat(
        [torch.arange(first, device=device), torch.arange(used - last, used, device=device)]
    )
    return slots.expand(*head_group.positions.shape[:2], -1)


def with_ends(
    scores: "Tensor", head_group: "KVHeadGroup", count: int, first: int, last: int
) -> "Tensor":
    """Slots of the `count` best entries by score, between the `first` and the `last` ones.

    Args:
        scores: `(batch, heads, used - first - last)`, of the entries in between; of all the
            head group's heads, or of some; on any device.

    Returns:
        `(batch, heads, first + count + last)` int64, ascending, on the scores' device.
    """
    import torch

    outer = ends(head_group, first, last, scores.device)[:, : scores.shape[1]]
    middle = top(scores, count) + first
    return torch.cat([outer[..., :first], middle, outer[..., first:]], -1)


def between(votes: "Tensor", first: int, last: int) -> "Tensor":
    """Votes `(batch, heads, used)` of the entries between a line's ends; none of a line that is
    no longer than these."""
    return votes[..., first : max(first, votes.shape[-1] - last)]


def to_choose(head_groups: "Sequence[KVHeadGroup]", average: int, first: int, last: int) -> int:
    """How many entries heads may choose, all together, beside the ends of their lines.

    Args:
        average: entries a head may keep.
    """
    return sum(
        len(head_group.heads) * (average - min(head_group.used, first + last))
        for head_group in head_groups
    )


def provided(
    scores: "Tensor", head_group: "KVHeadGroup", count: int, first: int, last: int
) -> "Selection":
    """`count` entries of each line, ends included, and their scores, until layers share.

    Args:
        scores: as in `with_ends`.
    """
    import torch
    import torch.nn.functional as F

    from kvlite.cache import Selection

    if head_group.used <= first + last:
        everything = ends(head_group, head_group.used, 0, scores.device)
        certain = torch.full(everything.shape, torch.inf, device=scores.device)
        return Selection(head_group, everything, selection_scores=certain)
    slots = with_ends(scores, head_group, count - first - last, first, last)
    scores = F.pad(scores, (first, last), value=torch.inf)
    return Selection(head_group, slots, selection_scores=scores.gather(-1, slots))


def won(
    head_groups: "Sequence[KVHeadGroup]",
    scores: "Sequence[Tensor]",
    counts: Sequence[Sequence[int]],
    first: int,
    last: int,
) -> "list[Selection]":
    """What heads keep that won different numbers of entries between their ends; a line no longer
    than its ends stays whole.

    Args:
        scores: of each head group, as in `with_ends`.
        counts: of each head group's heads.
    """
    from kvlite.cache import Selection

    selections = []
    for head_group, each, own in zip(head_groups, scores, counts, strict=True):
        if head_group.used <= first + last:
            selections.append(
                Selection(head_group, ends(head_group, head_group.used, 0, each.device))
            )
            continue
        for count, heads in alike(own):
            slots = with_ends(each[:, list(heads)], head_group, count, first, last)
            selections.append(Selection(head_group, slots, heads))
    return selections
