"""Entries that are computed whenever they are read, before those of a bank's own slots."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class Front(Protocol):
    """The first entries of a bank, held in a form smaller than keys and values. They never change:
    what is new goes into the bank's own slots, exactly."""

    @property
    def positions(self) -> Tensor:
        """`(batch, heads, entries)` int32, ascending."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds, each with a storage of its own; two layers may hold the same ones."""

    def write_keys(self, out: Tensor) -> None:
        """Compute the keys into `out`, `(batch, heads, entries, dim)`."""

    def write_values(self, out: Tensor) -> None:
        """Compute the values into `out`, `(batch, heads, entries, dim)`."""


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storage behind tensors, each counted once."""
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in unique.values())
