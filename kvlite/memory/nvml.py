"""Memory of a whole card, including other programs, as its driver counts it."""

import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlite.config.units import readable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CardUse:
    """Memory of a card now, in bytes.

    Attributes:
        used: by all programs.
        held: by torch in this process, in use or not.
    """

    total: int
    used: int
    held: int

    @property
    def others(self) -> int:
        """Bytes of other programs and the driver."""
        return max(0, self.used - self.held)

    @property
    def free(self) -> int:
        """Bytes that nobody uses."""
        return max(0, self.total - self.used)

    @property
    def spilled(self) -> int:
        """Bytes that torch holds but the card does not: the driver silently moved them to
        host memory, which is about ten times slower."""
        return max(0, self.held - self.used)


@dataclass(frozen=True)
class Card:
    """A card as its driver names it, whether or not torch can use it.

    Attributes:
        total, free: bytes.
        driver: its version.
        cuda: the newest CUDA that the driver runs, such as "13.0".
        capability: such as "8.9".
    """

    name: str
    total: int
    free: int
    driver: str
    cuda: str
    capability: str


def cards() -> list[Card]:
    """The NVIDIA cards of this machine that a driver reports."""
    found = list[Card]()
    with _driver() as nvml:
        if nvml is None:
            return found
        try:
            version = nvml.nvmlSystemGetCudaDriverVersion_v2()
            driver = nvml.nvmlSystemGetDriverVersion()
            cuda = f"{version // 1000}.{version % 1000 // 10}"
            for index in range(nvml.nvmlDeviceGetCount()):
                card = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(card)
                capability = ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(card)))
                sizes = int(memory.total), int(memory.free)
                found.append(Card(nvml.nvmlDeviceGetName(card), *sizes, driver, cuda, capability))
        except nvml.NVMLError:  # as of a card that fell off its bus
            pass
    return found


def card_use(device: "torch.device") -> CardUse | None:
    """What a card's driver reports, None if there is no driver to ask."""
    import torch

    if device.type != "cuda":
        return None
    with _driver() as nvml:
        if nvml is None:
            return None
        try:
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            found = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:
            return None
    return CardUse(int(found.total), int(found.used), torch.cuda.memory_reserved(device))


def spills() -> bool:
    """Whether drivers move what a card cannot hold to host memory: on Windows and in WSL."""
    return sys.platform == "win32" or in_wsl()


def in_wsl() -> bool:
    """Whether this is Linux within Windows."""
    return "microsoft" in platform.uname().release.lower()


def spill_note(devices: "Iterable[torch.device]") -> str:
    """A warning about tensors of these cards in host memory. Empty if there are none, or on
    systems whose drivers never move any there (the driver is then not asked)."""
    uses = map(card_use, devices) if spills() else ()
    spilled = sum(use.spilled for use in uses if use is not None)
    if not spilled:
        return ""
    return (
        f"the driver keeps {readable(spilled)} of the card's tensors in host memory, which is "
        "about ten times slower: give --vram less than the card has, or set CUDA - Sysmem "
        "Fallback Policy to Prefer No Sysmem Fallback in the NVIDIA Control Panel"
    )


@contextmanager
def _driver() -> Iterator[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no card
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
