"""Moving a layer's storage, in place, to mapped memory or elsewhere."""

import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.cache.copying import flat_storage

ALIGNED = 64


def move_storage(
    layer: LayerCache,
    tensors: Sequence[Tensor],
    homes_for: Callable[[list[Tensor]], list[Tensor]],
) -> None:
    """Move a layer's tensors to other memory. The tensors, and its head groups' views, stay the
    same objects.

    Args:
        tensors: the tensors to move, including keys, values and positions.
        homes_for: given one tensor per storage, returns flat tensors with the same bytes. If it
            fails, the layer is unchanged.
    """
    held = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    homes = dict(zip(held, homes_for(list(held.values())), strict=True))
    every = {id(tensor): tensor for tensor in [*layer.views, *tensors]}
    for tensor in every.values():
        home = homes[tensor.untyped_storage().data_ptr()]
        offset, size, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.set_(home.untyped_storage(), offset, size, stride)


def aligned_starts(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor's storage begins in one piece of memory, and where the last one ends."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.untyped_storage().nbytes() // ALIGNED) * ALIGNED)
    return starts


def mapped_copies(
    mapped: mmap.mmap, tensors: Sequence[Tensor], starts: Sequence[int]
) -> list[Tensor]:
    """Flat copies of storages in mapped memory at `aligned_starts`, each with its own storage;
    empty ones stay where they are."""
    copies = []
    for tensor, start in zip(tensors, starts, strict=False):
        flat = flat_storage(tensor)
        if len(flat):
            home = torch.frombuffer(mapped, dtype=torch.uint8, count=len(flat), offset=start)
            flat = home.copy_(flat)
        copies.append(flat)
    return copies
