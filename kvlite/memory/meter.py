"""Peak memory: of the allocator, of the process, or of live tensors counted one by one."""

import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CPU = torch.device("cpu")

_ASIDE: ContextVar[bool] = ContextVar("aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Tensors made in here count as host memory, not as the device's. If the device is a CPU,
    this is the only way to tell them apart."""
    token = _ASIDE.set(True)
    try:
        yield
    finally:
        _ASIDE.reset(token)


class TensorMeter(TorchDispatchMode):
    """Counts bytes of live tensor storage while it is entered; storage shared by views counts
    once. It sees what torch's operators return, not their inner workspaces.

    Attributes:
        live: bytes of storages on the device that are not freed yet.
        host: likewise in host memory.
        peak: the maximum of `live` so far.
        cap: the limit of `live`; None for no limit.
    """

    def __init__(
        self,
        held: Iterable[Tensor] = (),
        *,
        host: Iterable[Tensor] = (),
        device: torch.device = CPU,
        cap: int | None = None,
    ) -> None:
        """Start with the storages of `held` on the device, and of `host` in host memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.host = 0
        self.peak = 0
        self.cap: int | None = None
        self.device = device
        self._sizes: dict[int, tuple[int, bool, weakref.ref[Any]]] = {}
        with aside():
            for tensor in host:
                self._count(tensor)
        for tensor in held:
            self._count(tensor)
        self.cap = cap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it returned.

        Raises:
            torch.OutOfMemoryError: that is more than `cap`.
        """
        result = self._run(func, args, kwargs or {})
        if isinstance(result, Tensor):  # as nearly always
            self._count(result)
        else:
            for leaf in tree_iter(result):
                if isinstance(leaf, Tensor):
                    self._count(leaf)
        if self.cap is not None and self.live > self.cap:
            raise torch.OutOfMemoryError(
                f"{self.live:,} bytes of tensors are live, and {self.cap:,} are allowed"
            )
        return result

    def free(self, device: torch.device) -> int:
        """Bytes that tensors of a device may still take under the cap."""
        assert self.cap is not None
        return max(0, self.cap - self.live)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True would cost as much as the counting, and nothing here is compiled."""
        return False

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _takes_memory(self, tensor: Tensor) -> bool:
        return not tensor.is_meta

    def _count(self, tensor: Tensor) -> None:
        if not self._takes_memory(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            return
        elsewhere = self.device.type != "cpu" and tensor.device.type == "cpu"
        size, beside = storage.nbytes(), _ASIDE.get() or elsewhere
        key = storage._cdata
        freed = weakref.ref(storage, partial(self._free, key))
        self._sizes[key] = size, beside, freed
        if beside:
            self.host += size
            return
        self.live += size
        if self.cap is None or self.live <= self.cap:  # what is refused never was
            self.peak = max(self.peak, self.live)

    def _free(self, key: int, _: Any) -> None:
        size, beside = self._sizes.pop(key)[:2]
        if beside:
            self.host -= size
        else:
            self.live -= size


class PeakMeter:
    """Measures the peak that a run reports.

    Attributes:
        phases: peaks of the phases that ended, by name.
    """

    def __init__(
        self,
        kind: str,
        device: torch.device,
        held: Iterable[Tensor],
        host: Iterable[Tensor] = (),
        cap: int | None = None,
        cards: Sequence[torch.device] = (),
    ) -> None:
        """Begin to measure.

        Args:
            kind: "process" (the allocator's peak on CUDA) or "tensors".
            held, host: live tensors on the device and in host memory.
            cap: the limit of a CPU's live tensors in bytes; on a GPU the allocator has one.
            cards: all that there are, if there are several: their peaks are added up.
        """
        self.device, self.cards = device, {device, *cards}
        self.tensors = None
        self.phases: dict[str, int] = {}
        if kind == "tensors" or (cap is not None and device.type == "cpu"):
            cap = cap if device.type == "cpu" else None
            self.tensors = TensorMeter(held, host=host, device=device, cap=cap)
        self._reset()

    @property
    def of_tensors(self) -> bool:
        """Whether the peak is that of tensors on the device, not of the whole process."""
        return self.tensors is not None or self.device.type == "cuda"

    @property
    def capped(self) -> TensorMeter | None:
        """The meter that limits a CPU's tensors, if there is a limit."""
        return None if self.tensors is None or self.tensors.cap is None else self.tensors

    def probe(self) -> AbstractContextManager[Any]:
        """Enter this around all torch work that is to be measured."""
        return nullcontext() if self.tensors is None else self.tensors

    def end_phase(self, name: str) -> None:
        """Note the peak since the last phase and reset it, unless it is the process'."""
        if not self.of_tensors:
            return
        self.phases[name] = self._peak
        if self.tensors is not None:
            self.tensors.peak = self.tensors.live
        else:
            self._reset()

    def _reset(self) -> None:
        for card in self.cards if self.device.type == "cuda" else ():
            torch.cuda.reset_peak_memory_stats(card)

    @property
    def peak_bytes(self) -> int:
        """The peak so far, of all phases."""
        return max(self._peak, *self.phases.values(), 0)

    @property
    def _peak(self) -> int:
        if self.tensors is not None:
            return self.tensors.peak
        if self.device.type == "cuda":
            return sum(int(torch.cuda.max_memory_allocated(card)) for card in self.cards)
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The peak resident memory of this process."""
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
