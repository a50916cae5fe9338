"""Slots of a line: its first entries, its last ones, and the best of those in between."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlite.methods.scores import top
from kvlite.methods.share import alike

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvlite.cache import Bank, Selection


def ends(bank: "Bank", first: int, last: int, device: "torch.device | None" = None) -> "Tensor":
    """Slots of a bank's `first` and `last` entries: `(batch, heads, first + last)`, on the bank's
    device or another."""
    import torch

    used, device = bank.used, device or bank.own_keys.device
    slots = torch.cat(
        [torch.arange(first, device=device), torch.arange(used - last, used, device=device)]
    )
    return slots.expand(*bank.positions.shape[:2], -1)


def with_ends(scores: "Tensor", bank: "Bank", count: int, first: int, last: int) -> "Tensor":
    """Slots of the `count` best entries by score, between the `first` and the `last` ones.

    Args:
        scores: `(batch, heads, used - first - last)`, of the entries in between; of all the
            bank's heads, or of some; on any device.

    Returns:
        `(batch, heads, first + count + last)` int64, ascending, on the scores' device.
    """
    import torch

    outer = ends(bank, first, last, scores.device)[:, : scores.shape[1]]
    middle = top(scores, count) + first
    return torch.cat([outer[..., :first], middle, outer[..., first:]], -1)


def between(votes: "Tensor", first: int, last: int) -> "Tensor":
    """Votes `(batch, heads, used)` of the entries between a line's ends; none of a line that is
    no longer than these."""
    return votes[..., first : max(first, votes.shape[-1] - last)]


def to_choose(banks: "Sequence[Bank]", average: int, first: int, last: int) -> int:
    """How many entries heads may choose, all together, beside the ends of their lines.

    Args:
        average: entries a head may keep.
    """
    return sum(len(bank.heads) * (average - min(bank.used, first + last)) for bank in banks)


def provided(scores: "Tensor", bank: "Bank", count: int, first: int, last: int) -> "Selection":
    """`count` entries of each line, ends included, and their scores, until layers share.

    Args:
        scores: as in `with_ends`.
    """
    import torch
    import torch.nn.functional as F

    from kvlite.cache import Selection

    if bank.used <= first + last:
        everything = ends(bank, bank.used, 0, scores.device)
        certain = torch.full(everything.shape, torch.inf, device=scores.device)
        return Selection(bank, everything, votes=certain)
    slots = with_ends(scores, bank, count - first - last, first, last)
    votes = F.pad(scores, (first, last), value=torch.inf)
    return Selection(bank, slots, votes=votes.gather(-1, slots))


def won(
    banks: "Sequence[Bank]",
    scores: "Sequence[Tensor]",
    counts: Sequence[Sequence[int]],
    first: int,
    last: int,
) -> "list[Selection]":
    """What heads keep that won different numbers of entries between their ends; a line no longer
    than its ends stays whole.

    Args:
        scores: of each bank, as in `with_ends`.
        counts: of each bank's heads.
    """
    from kvlite.cache import Selection

    selections = []
    for bank, each, own in zip(banks, scores, counts, strict=True):
        if bank.used <= first + last:
            selections.append(Selection(bank, ends(bank, bank.used, 0, each.device)))
            continue
        for count, heads in alike(own):
            slots = with_ends(each[:, list(heads)], bank, count, first, last)
            selections.append(Selection(bank, slots, heads))
    return selections
