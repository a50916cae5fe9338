"""How fast this machine moves and multiplies numbers, which bounds the time of a token."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Larger than any processor's caches.
LARGE = 256 << 20
SECONDS = 1.0
SIDE = 1024


@dataclass(frozen=True)
class Speeds:
    """A device's speeds, per second.

    Attributes:
        memory_bytes: bytes read from its memory.
        transfer_bytes: bytes copied from pinned host memory; None for a CPU.
        operations: FLOPs of a matrix product (float32 on a CPU, else bfloat16); a multiplication
            and an addition count as two.
    """

    memory_bytes: float
    transfer_bytes: float | None
    operations: float


def measure_speeds(device: "torch.device", seconds: float = SECONDS) -> Speeds:
    """Measure a device for about `seconds` each. Takes 512 MiB there and as much in host memory.

    Raises:
        torch.OutOfMemoryError, RuntimeError: there is not that much memory.
    """
    import torch

    cuda = device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    numbers = torch.ones(LARGE // 4, device=device)
    read = LARGE / _time(numbers.sum, wait, seconds)
    transfer = None
    if cuda:
        there, here = torch.empty_like(numbers), torch.ones(LARGE // 4, pin_memory=True)
        transfer = LARGE / _time(lambda: there.copy_(here, non_blocking=True), wait, seconds)
    dtype, side = (torch.bfloat16, 8 * SIDE) if cuda else (torch.float32, SIDE)
    square = torch.ones(side, side, dtype=dtype, device=device)
    product = 2 * side**3 / _time(lambda: square @ square, wait, seconds)
    return Speeds(read, transfer, product)


def _time(work: Callable[[], object], wait: Callable[[], None], seconds: float) -> float:
    work()
    wait()
    best, end = float("inf"), perf_counter() + seconds
    while (start := perf_counter()) < end:
        work()
        wait()
        best = min(best, perf_counter() - start)
    return best
