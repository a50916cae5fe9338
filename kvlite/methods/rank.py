"""Effective rank: in how many directions a head's vectors really spread.

Source: "UNComp: Can Matrix Entropy Uncover Sparsity?", sections 3.1 to 3.3, Eq. 1 to 14.
"""

from collections.abc import Sequence
from itertools import pairwise

from kvlite.methods.types import Tensor


def spectrum(vectors: Tensor) -> Tensor:
    """Eigenvalues `(..., dim)` float64, falling, of the covariance of vectors `(..., n, dim)` that
    are centered and brought to length one (Eq. 1); they sum to 1. Vectors equal to the mean have no
    direction and are left out."""
    import torch

    centered = vectors.double() - vectors.double().mean(-2, keepdim=True)
    norms = centered.norm(dim=-1, keepdim=True)
    # What rounding leaves of equal vectors is not a direction.
    there = norms > 1e-9 * vectors.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)
    unit = torch.where(there, centered / norms.clamp(min=1e-300), 0.0)
    covariance = unit.transpose(-1, -2) @ unit / there.sum(-2, keepdim=True).clamp(min=1)
    eigenvalues: Tensor = torch.linalg.eigvalsh(covariance).flip(-1).clamp(min=0.0)
    return eigenvalues


def effective_rank(eigenvalues: Tensor, count: int) -> Tensor:
    """exp of the entropy of the `count` largest of falling eigenvalues `(..., dim)` (Eq. 9 and 10),
    not normalized again: `(...)` float64, from 1 to dim."""
    import torch

    largest = eigenvalues[..., :count]
    entropy: Tensor = -torch.special.xlogy(largest, largest).sum(-1)
    return entropy.exp()


def elbow(eigenvalues: Tensor) -> int:
    """How many of falling eigenvalues `(dim,)` come before the curve's elbow: the point furthest
    below the line from its first to its last."""
    import torch

    count = eigenvalues.shape[0]
    chord = torch.linspace(0, 1, count, dtype=eigenvalues.dtype)
    line = eigenvalues[0] + (eigenvalues[-1] - eigenvalues[0]) * chord
    return max(1, int((line - eigenvalues).argmax()))


def layer_groups(ranks: Sequence[float], drop: float) -> list[int]:
    """The group of each layer: a new one begins where the rank falls by more than `drop`
    (Eq. 11)."""
    groups = [0]
    for before, after in pairwise(ranks):
        groups.append(groups[-1] + (before - after > drop))
    return groups


def head_groups(order: Sequence[int], count: int) -> list[int]:
    """The group of each head: `count` groups (or one a head, if that is fewer) as equal as can be,
    the larger ones first; group 0 has the heads that come first in `order`."""
    count = min(count, len(order))
    size, larger = divmod(len(order), count)
    groups = [0] * len(order)
    begin = 0
    for group in range(count):
        end = begin + size + (group < larger)
        for head in order[begin:end]:
            groups[head] = group
        begin = end
    return groups


def group_sizes(groups: Sequence[int], average: int, low: int | None, floor: int) -> list[int]:
    """Entries of each head, falling evenly from the first group to the last (section 3.3, Eq. 14
    without its factor h - 1, as the paper's own sizes have it), their mean `average` at most.

    Args:
        groups: of each head.
        low: entries of the last group; None for half of the first's.
        floor: the fewest entries a head can keep.
    """
    steps = max(groups)
    if not steps:
        return [average] * len(groups)
    falls = [group / steps for group in groups]
    fall = sum(falls) / len(falls)
    last = average / (2 - fall) if low is None else low
    last = min(max(last, floor), average)
    first = (average - fall * last) / (1 - fall)
    return [int(first - (first - last) * each + 1e-9) for each in falls]
