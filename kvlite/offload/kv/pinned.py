"""Pinned host memory, which a CUDA device copies and reads while the host continues."""

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.offload.kv.moving import move_storage

# The Windows Subsystem for Linux only pins little at once.
PIECE = 256 << 20
PORTABLE = 1
CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91


class PinningError(Exception):
    """The system refuses to pin more memory."""


class _Pages(mmap.mmap):
    """Pages of their own, unregistered with CUDA before they are unmapped."""

    release_memory: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.release_memory is not None and not sys.is_finalizing():
            self.release_memory()


def pin(layer: LayerCache, device: torch.device) -> bool:
    """Move an empty layer's storage to pinned memory.

    Memory is allocated first and pinned afterwards, because torch's own pinned memory comes in
    powers of two and is never returned to the system.

    Returns:
        Whether this was possible; if not, the layer is unchanged.
    """
    try:
        own = [layer.keys, layer.values, layer.positions]
        move_storage(layer, own, lambda tensors: [_pinned_like(each, device) for each in tensors])
    except (PinningError, OSError):
        return False
    return True


def _pinned_like(tensor: Tensor, device: torch.device) -> Tensor:
    size = tensor.untyped_storage().nbytes()
    if not size:
        return tensor.flatten()
    pages = _pages(size)
    # All threads touch them, which takes most of the time: pinning does so one after the other.
    flat = torch.frombuffer(pages, dtype=torch.uint8).fill_(0)
    pinned: list[int] = []
    pages.release_memory = partial(release, pinned, device)
    for part in pieces(flat):
        address = flat.data_ptr() + part.start
        if not register(address, part.stop - part.start, device):
            raise PinningError
        pinned.append(address)
    return flat


def _pages(size: int) -> _Pages:
    if sys.platform == "win32":
        return _Pages(-1, size)
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def pieces(flat: Tensor) -> Iterator[slice]:
    """Parts of a flat tensor, each within one pinned piece of its storage, because a copy must not
    cross from one piece to the next."""
    each, before, at = PIECE // flat.element_size(), int(flat.storage_offset()), 0
    while at < flat.numel():
        end = min(flat.numel(), at + each - (before + at) % each)
        yield slice(at, end)
        at = end


def register(address: int, size: int, device: torch.device) -> bool:
    """Pin memory; returns whether this was possible."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE)) == 0:
        return True
    # CUDA reports the failure again after the next launch, which is this one.
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
    return False


def release(addresses: list[int], device: torch.device) -> None:
    """Unpin what begins at `addresses`."""
    if addresses:
        torch.cuda.synchronize(device)  # copies may be under way
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


def reads_pinned(device: torch.device) -> bool:
    """Whether kernels on a CUDA device read pinned memory at the host's own addresses."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    own, found = ctypes.c_int(), ctypes.c_int()
    asked = CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    return (
        cuda.cuDeviceGet(ctypes.byref(own), index) == 0
        and cuda.cuDeviceGetAttribute(ctypes.byref(found), asked, own) == 0
        and found.value == 1
    )
