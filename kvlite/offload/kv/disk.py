"""A host store's storage in temporary files instead of host memory."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.cache.copying import flat_storage
from kvlite.config.units import readable
from kvlite.errors import RecallError, reason
from kvlite.offload.kv.moving import aligned_starts, mapped_copies, move_storage

BLOCK = 1 << 20


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
