"""Pinned host memory, and asynchronous copies between it and a CUDA device, which copies and reads
it while the host continues; on a CPU copies happen at once."""

import ctypes
import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from kvlite.cache import KVHeadGroup, LayerCache
from kvlite.cache.quantization.hadamard import rotation
from kvlite.offload.kv.index import Index
from kvlite.offload.kv.storage import move_storage
from kvlite.ops.device import WIDEST

# The Windows Subsystem for Linux only pins little at once.
PIECE = 256 << 20
PORTABLE = 1
CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91


@dataclass(frozen=True)
class _Arriving:
    """Keys and values of a token on their way to a head group's slot."""

    head_group: KVHeadGroup
    slot: int
    both: Tensor
    done: torch.cuda.Event | None


class KVTransfer:
    """Copies from a device to a host store and back. Allocates nothing before it is used.

    Attributes:
        pins: whether all memory could be pinned so far.
        maps: whether the device reads pinned memory itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pins = self.stream is not None
        self.maps = self.pins and find_spec("triton") is not None and reads_pinned(device)
        self._arriving: deque[_Arriving] = deque()

    def pin(self, layer: LayerCache) -> None:
        """Move an empty layer's storage to pinned memory, unless that failed before."""
        self.pins = self.pins and pin(layer, self.device)

    def append(
        self, head_group: KVHeadGroup, keys: Tensor, values: Tensor, positions: Tensor
    ) -> None:
        """Like `KVHeadGroup.append`, for an exact head group in host memory with enough room, while
        the device continues. Do not read it before `wait`."""
        count = keys.shape[2]
        own = slice(head_group.used, head_group.used + count)
        with self._aside():
            _copy(head_group.residual_keys[:, :, own], keys)
            if not head_group.latent:
                _copy(head_group.residual_values[:, :, own], values)
            target = head_group.residual_positions[:, :, own]
            _copy(target, positions.expand(target.shape))
        head_group.used += count

    def restore(self, head_group: KVHeadGroup, made: KVHeadGroup, count: int) -> None:
        """Copy the first entries of an exact head group in host memory into one on the device."""
        _copy(made.residual_keys[:, :, :count], head_group.residual_keys[:, :, :count])
        if not made.latent:
            _copy(made.residual_values[:, :, :count], head_group.residual_values[:, :, :count])
        _copy(made.residual_positions[:, :, :count], head_group.residual_positions[:, :, :count])

    def put(
        self, head_group: KVHeadGroup, keys: Tensor, values: Tensor, position: int, index: Index
    ) -> None:
        """Append a token, `(batch, kv heads, 1, dim)` on the device, to a head group in host memory
        that has the room, and write it into the head group's index, where it does not count yet; it
        is there after the next `fetch` or `wait`."""
        slot = head_group.residual_len
        own = slice(slot, slot + 1)
        if self.reads(head_group):
            # torch brings triton along on CUDA alone.
            from kvlite.ops.triton_tell import tell

            host = values, head_group.residual_keys, head_group.residual_values
            tell(index, rotation(keys.shape[3], keys.device), keys, slot, host)
        else:
            index.put(keys, head_group.used)
            self._land(lambda each: each.done is not None and not each.done.query())
            both = torch.stack([keys, values])
            staged = torch.empty(both.shape, dtype=both.dtype, pin_memory=self.stream is not None)
            staged.copy_(both, non_blocking=True)
            self._arriving.append(_Arriving(head_group, slot, staged, self._now()))
        head_group.residual_positions[:, :, own] = position
        head_group.used += 1

    def fetch(
        self, source: KVHeadGroup, heads: tuple[int, ...], places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `(batch, heads, n, dim)`, on the device, of the entries at `places`
        `(batch, heads, n)` int64 of some KV heads of an exact source in host memory; the host waits
        once, for `places`."""
        named = torch.empty(places.shape, dtype=places.dtype, pin_memory=self.stream is not None)
        named.copy_(places, non_blocking=True)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
        self._land(lambda each: False)
        keys = self._gathered(source.residual_keys, heads, named)
        if source.latent:
            return keys, keys
        return keys, self._gathered(source.residual_values, heads, named)

    def wait(self) -> None:
        """Wait until all copies to the host have arrived."""
        if self.stream is not None:
            self.stream.synchronize()
            torch.cuda.current_stream(self.device).synchronize()
        self._land(lambda each: False)

    def _gathered(self, source: Tensor, heads: tuple[int, ...], places: Tensor) -> Tensor:
        shape, pinned = (*places.shape, source.shape[3]), self.stream is not None
        out = torch.empty(shape, dtype=source.dtype, pin_memory=pinned)
        for sequence, lines in enumerate(out):
            for row, head in enumerate(heads):
                own = source[sequence, head]
                torch.index_select(own, 0, places[sequence, row], out=lines[row])
        return out.to(self.device, non_blocking=True)

    def reads(self, head_group: KVHeadGroup) -> bool:
        """Whether a head group in host memory is exact, and the device can read and write it
        directly."""
        return (
            self.maps
            and head_group.residual_keys.shape[3] <= WIDEST
            and head_group.segment is None
            and head_group.residual_keys.is_pinned()
            and head_group.residual_values.is_pinned()
        )

    def _land(self, stays: Callable[[_Arriving], bool]) -> None:
        while self._arriving and not stays(self._arriving[0]):
            each = self._arriving[0]
            if each.done is not None:
                each.done.synchronize()
            own = slice(each.slot, each.slot + 1)
            keys, values = each.both
            each.head_group.residual_keys[:, :, own] = keys
            each.head_group.residual_values[:, :, own] = values
            self._arriving.popleft()

    def _now(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        now = torch.cuda.Event()
        now.record(torch.cuda.current_stream(self.device))
        return now

    def _aside(self) -> AbstractContextManager[None]:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)


def transfer_to(device: torch.device) -> KVTransfer | None:
    """A transfer for a device; None if the device uses host memory."""
    return KVTransfer(device) if device.type == "cuda" else None


def _copy(target: Tensor, source: Tensor) -> None:
    # Heads are contiguous; other copies would go through a buffer, and wait.
    for own, lines in zip(target, source, strict=True):
        for to, line in zip(own, lines, strict=True):
            flat, given = to.view(-1), line.reshape(-1)
            for part in pieces(given if target.is_cuda else flat):
                flat[part].copy_(given[part], non_blocking=True)
            if given.is_cuda:
                given.record_stream(torch.cuda.current_stream(given.device))


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
