"""Slots of a line: its first entries, its last ones, and the best of those in between."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlite.cache import Bank, Selection
from kvlite.methods.scores import top
from kvlite.methods.share import alike


def ends(bank: Bank, first: int, last: int) -> Tensor:
    """Slots of a bank's `first` and `last` entries: `(batch, heads, first + last)`."""
    used, device = bank.used, bank.keys.device
    slots = torch.cat(
        [torch.arange(first, device=device), torch.arange(used - last, used, device=device)]
    )
    return slots.expand(*bank.positions.shape[:2], -1)


def with_ends(scores: Tensor, bank: Bank, count: int, first: int, last: int) -> Tensor:
    """Slots of the `count` best entries by score, between the `first` and the `last` ones.

    Args:
        scores: `(batch, heads, used - first - last)`, of the entries in between; of all the
            bank's heads, or of some.

    Returns:
        `(batch, heads, first + count + last)` int64, ascending.
    """
    outer = ends(bank, first, last)[:, : scores.shape[1]]
    middle = top(scores, count) + first
    return torch.cat([outer[..., :first], middle, outer[..., first:]], -1)


def provided(scores: Tensor, bank: Bank, count: int, first: int, last: int) -> Selection:
    """`count` entries of each line, ends included, and their scores, until layers share.

    Args:
        scores: as in `with_ends`.
    """
    slots = with_ends(scores, bank, count - first - last, first, last)
    votes = F.pad(scores, (first, last), value=torch.inf)
    return Selection(bank, slots, votes=votes.gather(-1, slots))


def won(
    banks: Sequence[Bank],
    scores: Sequence[Tensor],
    counts: Sequence[Sequence[int]],
    first: int,
    last: int,
) -> list[Selection]:
    """What heads keep that won different numbers of entries between their ends.

    Args:
        scores: of each bank, as in `with_ends`.
        counts: of each bank's heads.
    """
    return [
        Selection(bank, with_ends(each[:, list(heads)], bank, count, first, last), heads)
        for bank, each, own in zip(banks, scores, counts, strict=True)
        for count, heads in alike(own)
    ]
