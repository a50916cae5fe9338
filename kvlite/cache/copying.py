"""Copies of layers on another device, or the same."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvlite.cache.layer import LayerCache


def copied(
    layers: Sequence[LayerCache],
    devices: Sequence[torch.device],
    home: Callable[[Tensor], Tensor] | None = None,
) -> list[LayerCache]:
    """Copies on a device each; what layers share, their copies share. Only between readings: what
    head groups remember for a cut to come is copied with them. `home` makes a flat copy of a
    storage, `(bytes,)` uint8, on the device."""
    homes: dict[int, Tensor] = {}
    placed: dict[int, Any] = {}
    for layer, device in zip(layers, devices, strict=True):
        made = partial(torch.Tensor.to, device=device, copy=True) if home is None else home
        for tensor in [*layer.tensors, *layer.views]:
            if id(tensor) not in placed:
                placed[id(tensor)] = _placed(tensor, homes, made)
    # All that is not a tensor is copied as it is; tensors are taken from where they were placed.
    return deepcopy([*layers], placed)


def flat_storage(tensor: Tensor) -> Tensor:
    """The storage behind a tensor, `(bytes,)` uint8; not a copy."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((length,), (1,), 0).view(torch.uint8)


def _placed(tensor: Tensor, homes: dict[int, Tensor], made: Callable[[Tensor], Tensor]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in homes:
        homes[storage._cdata] = made(flat_storage(tensor))
    home = homes[storage._cdata].view(tensor.dtype)
    return home.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
