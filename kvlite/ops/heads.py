"""Some heads of a tensor, taken and put without an index on the device: a list would be copied
there, and the host would wait for that."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def runs(heads: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Heads that follow each other: where they begin among `heads`, the first of them, how many."""
    at = 0
    while at < len(heads):
        end = at + 1
        while end < len(heads) and heads[end] == heads[at] + end - at:
            end += 1
        yield at, heads[at], end - at
        at = end


def of_heads(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of `(batch, heads, ...)`; a view where they follow each other."""
    parts = [tensor[:, first : first + length] for _, first, length in runs(heads)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def put_heads(target: Tensor, heads: Sequence[int], values: Tensor) -> None:
    """Write `(batch, len(heads), ...)` into some heads of `target`, `(batch, heads, ...)`."""
    for at, first, length in runs(heads):
        target[:, first : first + length] = values[:, at : at + length]
