"""What a device offers: memory that tensors may take, and how fast it is read."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from kvlite.config.units import readable, size_or_auto
from kvlite.memory.free import free_bytes
from kvlite.memory.nvml import spills

if TYPE_CHECKING:
    import torch


# What torch's allocator does not hand out: the driver's context, kernels, cuBLAS' workspaces.
CONTEXT = 600 << 20
# Left alone, since a display or another program may want it: less is safe on Linux than where a
# driver spills to host memory instead of saying that there is no more.
MARGIN, SPILLING_MARGIN = 700 << 20, 3 << 29
# Of the host memory that is free, if nobody says how much: for recall, and for checkpoints.
TIER_SHARE, CHECKPOINT_SHARE = 0.5, 0.25
# A plan's own error.
ERROR = 0.02

# GB/s, by what a card's name has in it; the first that does.
_BANDWIDTHS = {
    "RTX 5090": 1792,
    "RTX 5080": 960,
    "RTX 4090": 1008,
    "RTX 4080 SUPER": 736,
    "RTX 4080": 717,
    "RTX 4070 Ti SUPER": 672,
    "RTX 4070": 504,
    "RTX 4060 Ti": 288,
    "RTX 3090 Ti": 1008,
    "RTX 3090": 936,
    "RTX 3080 Ti": 912,
    "RTX 3080": 760,
    "RTX 3060 Ti": 448,
    "RTX 3060": 360,
    "RTX A6000": 768,
    "RTX 6000 Ada": 960,
    "L40S": 864,
    "L4": 300,
    "A100.*80GB": 1935,
    "A100": 1555,
    "H100": 3350,
    "H200": 4800,
    "A10": 600,
    "T4": 320,
}


@dataclass(frozen=True)
class DeviceBudget:
    """Memory of a device that a plan may count on.

    Attributes:
        name: of the device, for people.
        kind: "cpu" or "cuda".
        total: bytes it has, or that may be taken of it.
        context: of these, what is taken before the first tensor.
        margin: of these, what is left alone.
        host: bytes of host memory that are free.
        bandwidth: bytes a second at which it reads its memory; None if that is not known.
    """

    name: str
    kind: str
    total: int
    context: int
    margin: int
    host: int
    bandwidth: float | None = None

    @property
    def tensors(self) -> int:
        """Bytes that tensors may take."""
        return max(0, self.total - self.context - self.margin)


def capped_bytes(vram: str) -> int | None:
    """What `--vram` says, None for auto.

    Raises:
        SettingError: it is no size, or none at all.
    """
    return size_or_auto("--vram", vram, "24GiB, 800MB", least=1)


def ram_limit(text: str, held: int) -> int:
    """Bytes that a host store may take: as written, or with `auto` half of what is free without it.

    Args:
        held: bytes it takes now.

    Raises:
        SettingError: it is no size.
    """
    limit = size_or_auto("--recall-limit", text, "8GiB, 500MB")
    return int(TIER_SHARE * (psutil.virtual_memory().available + held)) if limit is None else limit


def checkpoint_limit(text: str) -> int:
    """Bytes of host memory that checkpoints may take: as written, or with `auto` a share of what
    is free.

    Raises:
        SettingError: it is no size.
    """
    limit = size_or_auto("--checkpoint-limit", text, "2GiB, 500MB")
    return int(CHECKPOINT_SHARE * psutil.virtual_memory().available) if limit is None else limit


def device_budget(device: "torch.device", vram: str) -> DeviceBudget:
    """What a device of this machine offers now.

    Raises:
        SettingError: `vram` is no size.
    """
    import torch

    cap, free = capped_bytes(vram), free_bytes(device)
    if device.type == "cpu":
        total = free if cap is None else min(cap, free)
        name = "this machine's RAM" if cap is None else f"{readable(cap)} of this machine's RAM"
        return DeviceBudget(name, "cpu", total, 0, int(ERROR * total), free)
    # Where a driver spills, torch may hold more than there is.
    _, all_there = torch.cuda.mem_get_info(device)
    total, host = min(all_there if cap is None else cap, free), psutil.virtual_memory().available
    name = torch.cuda.get_device_properties(device).name
    # The context is there already: it is not in what is free.
    return DeviceBudget(name, "cuda", total, 0, margin(), host, bandwidth(name))


def card(vram: str, name: str = "") -> DeviceBudget:
    """What a card offers that is not here.

    Args:
        vram: its size.
        name: as its maker calls it.
    """
    total, shown = capped_bytes(vram) or 0, name or f"a card of {vram}"
    host = psutil.virtual_memory().available
    return DeviceBudget(shown, "cuda", total, CONTEXT, margin(), host, bandwidth(name))


def hold(device: "torch.device", vram: str) -> None:
    """Keep torch's allocator on a GPU to what may be taken; a CPU's tensors a meter counts."""
    import torch

    cap = capped_bytes(vram)
    if device.type == "cpu":
        return
    if cap is None:  # a model loaded before may have had one
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)


def bandwidth(name: str) -> float | None:
    """Bytes a second of a card's memory, if it is known."""
    found = (
        speed
        for part, speed in _BANDWIDTHS.items()
        if re.search(rf"\b{part}\b(?! Ti| SUPER)", name, re.IGNORECASE)
    )
    speed = next(found, None)
    return None if speed is None else speed * 1e9


def margin() -> int:
    """Bytes that are left alone on this system."""
    return SPILLING_MARGIN if spills() else MARGIN
