"""How much memory is free now, and letting go of what nobody needs."""

import gc
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


_HOST = "can't allocate memory"
_CUBLAS = "CUBLAS_STATUS_ALLOC_FAILED"


def is_oom(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of a device, of a library on it, or of the
    host."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error) if isinstance(error, RuntimeError) else ""
    return _CUBLAS in said or _HOST in said


def free_bytes(device: "torch.device") -> int:
    """Bytes that can be taken on a device now, by this process: what its driver has free, and what
    torch holds there without using it; on a CPU what the system can give."""
    import torch

    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + held)


def release_memory(device: "torch.device") -> None:
    """Give back what nothing refers to any more. Not to be called where an error is handled: its
    traceback holds all that the failed work had made."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
