"""Which tokens go on into the next layer while reading, by the attention they just got."""

from typing import TYPE_CHECKING

from kvlite.methods.base import LayerView
from kvlite.methods.scores import top, window_scores

if TYPE_CHECKING:
    from torch import Tensor


def votes_for_new(view: LayerView, through: int, weights: "Tensor | None" = None) -> "Tensor":
    """The observed attention to the tokens that went through a layer, added up over its heads,
    and over the sequences of a batch.

    Args:
        through: how many they are, the last entries of the layer's head groups.
        weights: `(rows,)` float32, how much each observed row counts.

    Returns:
        `(through,)` float32, at the window's place.
    """
    import torch

    scores = [
        window_scores(head_group, view.window, "sum", "sum", weights)
        for head_group in view.head_groups
    ]
    return torch.cat([each[..., -through:] for each in scores], 1).sum((0, 1))


def going(votes: "Tensor", width: int, last: int) -> "Tensor":
    """The best by vote, and the last.

    Args:
        votes: `(tokens,)`.
        width: how many go on.
        last: how many of them are the last ones, whatever their vote.

    Returns:
        `(width,)` int64, ascending.
    """
    import torch

    older = votes.shape[0] - last
    recent = torch.arange(older, votes.shape[0], device=votes.device)
    return torch.cat([top(votes[:older], width - last), recent])
