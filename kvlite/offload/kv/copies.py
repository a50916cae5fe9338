"""Copies of a host store that share what was read, for several answers at once.

On Linux, exact entries lie in a memory file that every copy maps privately: only the pages that a
copy writes (its question and its answer) are its own, everything else exists once. A copy is a full
copy on other systems, of quantized entries and sliding windows, and of pinned memory that a CUDA
device reads: a mapping would be pinned page by page, each of them a copy.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import finalize

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.cache.copying import copied
from kvlite.cache.recurrent import state_tensors
from kvlite.cache.segment import bytes_held
from kvlite.offload.kv.storage import aligned_starts, mapped_copies, move_storage
from kvlite.offload.kv.store import HOST, HostKVLayer, HostKVStore


class StoreCopies:
    """Makes copies of a host store in memory, each for a question and its answer.

    Attributes:
        own_bytes: bytes of host memory that another copy takes.
    """

    @torch.inference_mode()
    def __init__(self, store: HostKVStore, room: int) -> None:
        """Of a store as it is now. It stays as it is, in memory that is shared from here on; if
        memory runs out, part of it.

        Args:
            room: entries that a copy may add, its answer's included.
        """
        store.forget_answer()
        self.store, self.room = store, room
        self.pages = _Pages() if hasattr(os, "memfd_create") else None
        self.own_bytes = bytes_held(state_tensors(store.states))
        for layer in store.layers:
            if _pinned_for(layer, store) is not None:
                self.own_bytes += (
                    layer.cache.nbytes * (layer.read + room) // layer.head_group.capacity
                )
                continue
            if self.pages is None or layer.window is not None or store.bits is not None:
                self.own_bytes += layer.cache.nbytes
                continue
            if layer.head_group.room < room:
                layer.cache = layer.cache.resized([layer.read + room])
            self.pages.take(layer.cache)
            pages = len(layer.cache.tensors) * len(layer.head_group.heads) * 2 * mmap.PAGESIZE
            self.own_bytes += pages + layer.cache.nbytes * room // layer.head_group.capacity

    @torch.inference_mode()
    def copy(self) -> HostKVStore:
        """Make another copy. Raises MemoryError if host memory has no room for it."""
        home = None if self.pages is None else self.pages.copying()
        made = HostKVStore([], self.store.bits, self.store.seen, spare=self.store.spare)
        for layer in self.store.layers:
            device, index = _pinned_for(layer, self.store), layer.index
            if device is None:
                (cache,) = copied([layer.cache], [HOST], home)
            else:
                cache = layer.grown(self.room, made.transfer(device))
            if index is not None:
                index = replace(index, signs=index.signs.clone(), sizes=index.sizes.clone())
            made.layers.append(replace(layer, cache=cache, index=index, disk=None))
        made.carry(self.store.states)
        return made


def _pinned_for(layer: HostKVLayer, store: HostKVStore) -> torch.device | None:
    """The device that reads a layer where it lies, if one does."""
    device = None if layer.index is None else layer.index.mean.device
    transfer = None if device is None else store.transfers.get(device)
    return device if transfer is not None and transfer.reads(layer.head_group) else None


class _Pages:
    """Memory without a name that can be mapped many times."""

    def __init__(self) -> None:
        self._file = os.memfd_create("kvlite")
        self._size = 0
        self._starts: dict[int, int] = {}
        finalize(self, os.close, self._file)

    def take(self, layer: LayerCache) -> None:
        """Move a layer's storage to the memory file; its tensors stay the same objects.

        Raises:
            MemoryError: there is not enough memory; the layer is unchanged.
        """
        try:
            move_storage(layer, layer.tensors, self._taken)
        except OSError as error:
            raise MemoryError from error

    def _taken(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        begin, starts = self._size, aligned_starts(tensors)
        unit = mmap.ALLOCATIONGRANULARITY
        length = max(1, -(-starts[-1] // unit)) * unit
        os.posix_fallocate(self._file, begin, length)  # a page that is not there kills a program
        mapped = mmap.mmap(self._file, length, offset=begin)
        self._size += length
        homes = mapped_copies(mapped, tensors, starts)
        for home, start in zip(homes, starts, strict=False):
            if len(home):
                self._starts[home.data_ptr()] = begin + start
        return homes

    def copying(self) -> Callable[[Tensor], Tensor]:
        """A function that copies storages, for `copied`. A copy of a storage in the memory file
        takes only the pages that are written to."""
        mapped = mmap.mmap(self._file, self._size, mmap.MAP_PRIVATE) if self._size else None

        def copy(flat: Tensor) -> Tensor:
            start = self._starts.get(flat.data_ptr())
            if start is None or mapped is None:
                return flat.clone()
            return torch.frombuffer(mapped, dtype=torch.uint8, count=len(flat), offset=start)

        return copy
