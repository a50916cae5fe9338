"""Copies of a host store that share what was read, for several answers at once.

On Linux, exact entries lie in a file, in memory unless the store is on disk, that the store and
every copy map privately: only the pages that one of them writes (its question and its answer) are
its own, everything else exists once. A copy is a full copy on other systems, of quantized entries
and sliding windows, and of pinned memory that a CUDA device reads: a mapping would be pinned page
by page, each of them a copy.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import finalize

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.cache.copying import copied
from kvlite.cache.recurrent import state_tensors
from kvlite.cache.segment import bytes_held
from kvlite.offload.kv.storage import Disk, aligned_starts, mapped_copies, move_storage
from kvlite.offload.kv.store import HOST, HostKVLayer, HostKVStore


class StoreCopies:
    """Makes copies of a host store in memory, each for a question and its answer.

    Attributes:
        own_bytes: bytes of host memory that another copy takes.
    """

    @torch.inference_mode()
    def __init__(self, store: HostKVStore, room: int) -> None:
        """Of a store as it is now, in memory that is shared from here on; if memory runs out, part
        of it. It stays as it is until all copies are made.

        Args:
            room: entries that a copy may add, its answer's included.
        """
        store.forget_answer()
        self.store, self.room = store, room
        self.pages = _Pages(store.disk) if hasattr(os, "memfd_create") else None
        self.own_bytes = bytes_held(state_tensors(store.states))
        for layer in store.layers:
            if _pinned_for(layer, store) is not None:
                self.own_bytes += (
                    layer.cache.nbytes * (layer.read + room) // layer.head_group.capacity
                )
                continue
            if not self._is_shared(layer):
                self.own_bytes += 0 if layer.disk else layer.cache.nbytes
                continue
            assert self.pages is not None
            if layer.head_group.room < room:
                layer.cache = layer.cache.resized([layer.read + room])
            self.pages.take(layer.cache)
            pages = len(layer.cache.tensors) * len(layer.head_group.heads) * 2 * mmap.PAGESIZE
            self.own_bytes += pages + layer.cache.nbytes * room // layer.head_group.capacity

    @torch.inference_mode()
    def copy(self) -> HostKVStore:
        """Make another copy. Raises MemoryError if host memory has no room for it."""
        home = None if self.pages is None else self.pages.copying()
        bits, disk = self.store.bits, self.store.disk
        made = HostKVStore([], bits, self.store.seen, disk, spare=self.store.spare)
        for layer in self.store.layers:
            device, index = _pinned_for(layer, self.store), layer.index
            if device is None:
                (cache,) = copied([layer.cache], [HOST], home)
            else:
                cache = layer.grown(self.room, made.transfer(device))
            if index is not None:
                index = replace(index, signs=index.signs.clone(), sizes=index.sizes.clone())
            if layer.disk is not None and not self._is_shared(layer):
                layer.disk.take(cache)
            made.layers.append(replace(layer, cache=cache, index=index))
        made.carry(self.store.states)
        return made

    def _is_shared(self, layer: HostKVLayer) -> bool:
        """Whether its entries lie in pages that copies share."""
        return self.pages is not None and layer.window is None and self.store.bits is None


def _pinned_for(layer: HostKVLayer, store: HostKVStore) -> torch.device | None:
    """The device that reads a layer where it lies, if one does."""
    device = None if layer.index is None else layer.index.mean.device
    transfer = None if device is None else store.transfers.get(device)
    return device if transfer is not None and transfer.reads(layer.head_group) else None


class _Pages:
    """A file without a name that can be mapped many times: in memory, or on disk."""

    def __init__(self, disk: Disk | None) -> None:
        try:
            if disk is None:
                self._file = os.memfd_create("kvlite")
            else:
                with tempfile.TemporaryFile(dir=disk.folder) as file:
                    self._file = os.dup(file.fileno())
        except OSError as error:
            raise MemoryError from error
        self._size = 0
        self._starts: dict[int, int] = {}
        finalize(self, os.close, self._file)

    def take(self, layer: LayerCache) -> None:
        """Move a layer's storage to the file; its tensors stay the same objects.

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
        filled = mapped_copies(mmap.mmap(self._file, length, offset=begin), tensors, starts)
        mapped = mmap.mmap(self._file, length, mmap.MAP_PRIVATE, offset=begin)
        self._size += length
        for number, (home, start) in enumerate(zip(filled, starts, strict=False)):
            if count := len(home):
                home = torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=start)
                self._starts[home.data_ptr()], filled[number] = begin + start, home
        return filled

    def copying(self) -> Callable[[Tensor], Tensor]:
        """A function that copies storages, for `copied`. A copy of a storage in the file takes only
        the pages that are written to."""
        mapped = mmap.mmap(self._file, self._size, mmap.MAP_PRIVATE) if self._size else None

        def copy(flat: Tensor) -> Tensor:
            start = self._starts.get(flat.data_ptr())
            if start is None or mapped is None:
                return flat.clone()
            return torch.frombuffer(mapped, dtype=torch.uint8, count=len(flat), offset=start)

        return copy
