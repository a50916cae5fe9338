"""Where a layer's storage lies: moved in place, to mapped memory or into temporary files."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.cache.copying import flat_storage
from kvlite.config.units import readable
from kvlite.errors import RecallError, reason

ALIGNED = 64
BLOCK = 1 << 20


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


@dataclass(frozen=True)
class Disk:
    """A folder for unnamed files: nobody can remove or change them, and none is left behind,
    however the program ends. The folder is created when it is needed."""

    folder: Path

    def require(self, needed: int) -> None:
        """Raise RecallError if fewer than `needed` bytes are free, or nothing can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise self._refusal(error) from error
        if needed > free:
            raise RecallError(
                f"recall would take {readable(needed)} in {self.folder}, which has "
                f"{readable(free)} free: what is dropped is forgotten; --recall-bits 4 takes a "
                "quarter, KVLITE_CACHE names another folder"
            )

    def take(self, layer: LayerCache) -> None:
        """Move a layer's storage into a file; its tensors stay the same objects.

        Raises:
            RecallError: the disk is full or fails; the layer is unchanged.
        """
        try:
            move_storage(layer, layer.tensors, self._mapped)
        except OSError as error:
            raise self._refusal(error) from error

    def _mapped(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts = aligned_starts(tensors)
        if not starts[-1]:
            return [flat_storage(tensor) for tensor in tensors]
        with tempfile.TemporaryFile(dir=self.folder) as file:
            _reserve(file, starts[-1])
            mapped = mmap.mmap(file.fileno(), starts[-1])
        return mapped_copies(mapped, tensors, starts)

    def _refusal(self, error: OSError) -> RecallError:
        return RecallError(
            f"recall cannot keep anything in {self.folder} ({reason(error)}): what is dropped is "
            "forgotten; KVLITE_CACHE names another folder"
        )


def _reserve(file: IO[bytes], size: int) -> None:
    # Writing to a mapped page on a full disk would kill the program.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    block = bytes(BLOCK)
    for start in range(0, size, BLOCK):
        file.write(block[: min(BLOCK, size - start)])
    file.flush()
