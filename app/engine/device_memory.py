"""What this process holds of a device, and giving it back."""

import ctypes
import gc
import sys

import psutil
import torch


def held_now(device: torch.device) -> int:
    """Bytes: on a GPU what torch's allocator has reserved, on a CPU what of this process is
    resident."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return int(psutil.Process().memory_info().rss)


def release_memory(device: torch.device, before: int) -> int:
    """Let nobody keep memory that nothing is in any more.

    Args:
        before: bytes that were held when something was still in it.

    Returns:
        Bytes that are free again.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        # The C library keeps what was freed for itself until it is told otherwise.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    return max(0, before - held_now(device))
