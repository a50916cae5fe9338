"""What llama.cpp's converter does to tensors, undone.

Rows in another order are put back in packed weights, too; what changes numbers needs them unpacked.
An order of rows says, for each of transformers' rows, which one of the file's it is.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def halves(rows: int, heads: int) -> Tensor:
    """Of heads whose neighboring channels rotate together, the order in which halves do."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def grouped(rows: int, first: int, groups: int, each: int, dim: int) -> Tensor:
    """Of value heads that lie `each` by `each` (v0 of all key heads, then v1), the order by key
    heads. Rows before `first` stay."""
    own = torch.arange(first, rows).view(each, groups, dim).transpose(0, 1).flatten()
    return torch.cat((torch.arange(first), own))


def by_key_head(rows: int, groups: int, key_dim: int, value_dim: int) -> Tensor:
    """Of all queries, all keys, all values and all gates, the order in which each key head has its
    own of each."""
    sizes = [key_dim, key_dim, value_dim, value_dim]
    kinds = torch.arange(rows).split([groups * size for size in sizes])
    parts = [kind.view(groups, size) for kind, size in zip(kinds, sizes, strict=True)]
    return torch.cat(parts, 1).flatten()


def alternating(rows: int) -> Tensor:
    """Of all gates, then all others, the order in which one of each follows the other."""
    return torch.arange(rows).view(2, -1).t().flatten()


def less_one(tensors: list[Tensor]) -> Tensor:
    """Norms to which 1 was added."""
    return tensors[0] - 1


def log_of_minus(tensors: list[Tensor]) -> Tensor:
    """What is stored as `-exp(A)`."""
    return (-tensors[0]).log()


def expanded(tensors: list[Tensor]) -> Tensor:
    """The one projection of latents that keys `(heads, latent, nope)` and values `(heads, value,
    latent)` were cut out of, `(heads * (nope + value), latent)`."""
    if len(tensors) == 1:
        return tensors[0]
    keys, values = tensors
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


ORDERS: dict[str, Callable[..., Tensor]] = {
    made.__name__: made for made in (halves, grouped, by_key_head, alternating)
}
NUMBERS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    made.__name__: made for made in (less_one, log_of_minus, expanded)
}
