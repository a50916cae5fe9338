"""Copies of layers on another device, or the same."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from kvlite.cache.layer import LayerCache


def copied(layers: Sequence[LayerCache], device: torch.device) -> list[LayerCache]:
    """Copies on a device; what layers share, their copies share.

    Only between readings: what head groups remember for a cut to come is copied with them.
    """
    homes: dict[int, Tensor] = {}
    placed: dict[int, Any] = {}
    for layer in layers:
        for tensor in [*layer.tensors, *layer.views]:
            if id(tensor) not in placed:
                placed[id(tensor)] = _placed(tensor, homes, device)
    # All that is not a tensor is copied as it is; tensors are taken from where they were placed.
    return deepcopy([*layers], placed)


def _placed(tensor: Tensor, homes: dict[int, Tensor], device: torch.device) -> Tensor:
    """The same view of a copy of its storage, of which there is one."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in homes or not storage.nbytes():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        homes[storage.data_ptr()] = flat.to(device, copy=True)
    home = homes[storage.data_ptr()].untyped_storage()
    placed = torch.empty(0, dtype=tensor.dtype, device=device)
    return placed.set_(home, tensor.storage_offset(), tensor.shape, tensor.stride())
