"""Peak memory: of the allocator, of the process, or of live tensors counted one by one."""

import re
import sys
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorMeter(TorchDispatchMode):
    """Counts bytes of live tensor storage while it is entered; storage shared by views counts
    once. It sees what torch's operators return, not their inner workspaces.

    Attributes:
        live: bytes of the storages known and not yet freed.
        peak: the most that `live` has been.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        """Start with the storages of `held` (the weights) as live."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in held:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, count what it returned."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _takes_memory(self, tensor: Tensor) -> bool:
        return not tensor.is_meta

    def _count(self, tensor: Tensor) -> None:
        if not self._takes_memory(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            return
        size = storage.nbytes()
        self._sizes[storage._cdata] = size
        weakref.finalize(storage, self._free, storage._cdata).atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class PeakMeter:
    """The peak a run reports, and what it must be measured with."""

    def __init__(self, kind: str, device: torch.device, weights: Iterable[Tensor]) -> None:
        """Begin to measure.

        Args:
            kind: "process" (the allocator's peak on CUDA) or "tensors".
            weights: tensors that are live already.
        """
        self.device = device
        self.tensors = TensorMeter(weights) if kind == "tensors" else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def watch(self) -> AbstractContextManager[Any]:
        """Enter this around every piece of torch work that is to be measured."""
        return nullcontext() if self.tensors is None else self.tensors

    @property
    def peak_bytes(self) -> int:
        """The peak so far."""
        if self.tensors is not None:
            return self.tensors.peak
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most resident memory this process has had."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # getrusage would start at the size of the process that started this one.
        high = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        if high is not None:
            return int(high[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
