"""How much memory is free, and releasing unused memory."""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import psutil

from kvlite.config.units import readable

if TYPE_CHECKING:
    import torch


# Of mallopt.
_ARENA_MAX = -8
_HOST = "can't allocate memory"
_CUBLAS = "CUBLAS_STATUS_ALLOC_FAILED"


def is_oom(error: BaseException) -> bool:
    """Whether an error means that memory ran out: on the device, in a library, or on the host."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error) if isinstance(error, RuntimeError) else ""
    return _CUBLAS in said or _HOST in said


def free_bytes(device: "torch.device") -> int:
    """Bytes that this process can take on a device now: what the driver has free, and what torch
    holds without using it; on a CPU, what the system has available."""
    import torch

    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + held)


def recorded_bytes(device: "torch.device") -> int:
    """Bytes of those that are free only for replays of CUDA graphs: each recording holds what it
    works with."""
    import torch

    if device.type != "cuda":
        return 0
    parts = torch.cuda.memory_snapshot()
    own = (each for each in parts if each["device"] == (device.index or 0))
    return sum(
        each["total_size"] - each["allocated_size"]
        for each in own
        if each["segment_pool_id"] != (0, 0)
    )


def with_free(
    devices: "Iterable[torch.device]", free: "Callable[[torch.device], int]" = free_bytes
) -> str:
    """Devices with what is free on each, for messages: `cuda:0 with 2.00 GiB free and ...`."""
    return " and ".join(f"{device} with {readable(free(device))} free" for device in devices)


def release_memory(device: "torch.device") -> None:
    """Free what nothing refers to any more. Do not call this while an error is handled: its
    traceback keeps the tensors of the failed work alive."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held_bytes(devices: "Sequence[torch.device]") -> int:
    """Bytes this process holds: on GPUs what torch has reserved, on a CPU what is resident."""
    import torch

    if devices[0].type != "cuda":
        return int(psutil.Process().memory_info().rss)
    return sum(torch.cuda.memory_reserved(device) for device in devices)


def return_memory(devices: "Sequence[torch.device]") -> int:
    """Give what nothing refers to any more back to the system, so that another model may have it;
    the bytes that are still held."""
    gc.unfreeze()
    release_memory(devices[0])  # of all cards
    trim_heap()
    return held_bytes(devices)


def trim_heap() -> None:
    """Give what was freed back to the system; the C library keeps it until it is told otherwise."""
    _of_glibc("malloc_trim", 0)


def share_heap() -> None:
    """Let all threads that begin later allocate from two heaps: by itself the C library has eight
    for each core, and in each of them keeps what large requests left free."""
    _of_glibc("mallopt", _ARENA_MAX, 2)


def _of_glibc(name: str, *args: int) -> None:
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*args)


def settle_heap() -> None:
    """Look for garbage no more among what there is now: with all that was imported that takes some
    tenths of a second, in which no thread goes on. `return_memory` ends that."""
    gc.collect()
    gc.freeze()
