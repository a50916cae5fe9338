"""What a device offers: memory for tensors, and its bandwidth."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from kvlite.config.units import readable, size_or_auto
from kvlite.memory.free import free_bytes, recorded_bytes
from kvlite.memory.nvml import spills

if TYPE_CHECKING:
    import torch


# Outside torch's allocator: the driver's context, kernels, cuBLAS' workspaces.
CONTEXT = 600 << 20
# What a desktop takes of a card that is not here to be asked, of those that people have one on.
DESKTOP, _HAS_DESKTOP = 614 << 20, r"\bRTX \d{4}\b"
# Left for other programs, and a desktop that grows: more where a driver spills instead of failing.
MARGIN, SPILLING_MARGIN = 700 << 20, 3 << 29
# With "auto", shares of the free host memory for recall and for checkpoints.
HOST_KV_SHARE, CHECKPOINT_SHARE = 0.5, 0.25
# How far a plan may be off.
ERROR = 0.02

# GB/s by a part of a card's name; the first match counts.
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
        name: as users see it.
        kind: "cpu" or "cuda".
        total: bytes it has, or may use.
        context: bytes of these in use before the first tensor.
        desktop: bytes of these that a desktop is counted to take.
        margin: bytes of these left free.
        host: free bytes of host memory.
        bandwidth: bytes per second, None if unknown.
        cards: the single cards, if this stands for several.
    """

    name: str
    kind: str
    total: int
    context: int
    margin: int
    host: int
    bandwidth: float | None = None
    desktop: int = 0
    cards: "tuple[DeviceBudget, ...]" = ()

    @property
    def tensors(self) -> int:
        """Bytes that tensors may take."""
        return max(0, self.total - self.context - self.desktop - self.margin)

    @property
    def offered(self) -> str:
        """The budget in words."""
        return f"{readable(self.tensors)} for tensors of {self.name}"


def capped_bytes(vram: str) -> int | None:
    """The bytes that `--vram` allows, None for auto.

    Raises:
        SettingError: it is not a size above zero.
    """
    return size_or_auto("--vram", vram, "24GiB, 800MB", least=1)


def parse_recall_limit(text: str) -> int | None:
    """The bytes that `--recall-limit` allows, None for auto. Raises SettingError if it is no
    size."""
    return size_or_auto("--recall-limit", text, "8GiB, 500MB")


def parse_checkpoint_limit(text: str) -> int | None:
    """The bytes that `--checkpoint-limit` allows, None for auto. Raises SettingError if it is no
    size."""
    return size_or_auto("--checkpoint-limit", text, "2GiB, 500MB")


def ram_limit(limit: int | None, held: int) -> int:
    """Bytes that a host store may take: as limited, or half of what would be free without the
    `held` bytes it has now."""
    if limit is not None:
        return limit
    return int(HOST_KV_SHARE * (psutil.virtual_memory().available + held))


def checkpoint_limit(limit: int | None) -> int:
    """Bytes of host memory that checkpoints may take: as limited, or a share of what is free."""
    return int(CHECKPOINT_SHARE * psutil.virtual_memory().available) if limit is None else limit


def device_budget(device: "torch.device", cap: int | None, freed: int = 0) -> DeviceBudget:
    """What a device of this machine offers now, or will once `freed` bytes of it are; at most
    `cap`."""
    import torch

    free = free_bytes(device) + freed
    if device.type == "cpu":
        total = free if cap is None else min(cap, free)
        name = "this machine's RAM" if cap is None else f"{readable(cap)} of this machine's RAM"
        return DeviceBudget(name, "cpu", total, 0, int(ERROR * total), free)
    # Where a driver spills, torch may hold more than the card has.
    _, all_there = torch.cuda.mem_get_info(device)
    total, host = min(all_there if cap is None else cap, free), psutil.virtual_memory().available
    name = torch.cuda.get_device_properties(device).name
    # The context exists already and is not part of what is free.
    return DeviceBudget(name, "cuda", total, 0, margin(), host, bandwidth(name))


def spare_bytes(devices: "Sequence[torch.device]") -> int:
    """Bytes of devices that one more plan may count on beside all that is there; with several,
    which a plan fills alike, the fullest one counts for each."""
    least = min(free_bytes(each) - recorded_bytes(each) for each in devices)
    return max(0, int((1 - ERROR) * len(devices) * least))


def card(total: int, name: str) -> DeviceBudget:
    """What a card of this size, not in this machine, offers."""
    host, speed = psutil.virtual_memory().available, bandwidth(name)
    desktop = DESKTOP if re.search(_HAS_DESKTOP, name) else 0
    return DeviceBudget(name, "cuda", total, CONTEXT, margin(), host, speed, desktop)


def together(cards: Sequence[DeviceBudget]) -> DeviceBudget:
    """What several cards offer. They take turns, so their bandwidth is the slowest one's."""
    if len(cards) == 1:
        return cards[0]
    name = several(each.name for each in cards)
    total, context, desktop, margin = (
        sum(getattr(each, part) for each in cards)
        for part in ("total", "context", "desktop", "margin")
    )
    speeds = [each.bandwidth for each in cards]
    slowest = None if None in speeds else min(speed for speed in speeds if speed is not None)
    host = cards[0].host
    return DeviceBudget(name, "cuda", total, context, margin, host, slowest, desktop, tuple(cards))


def several(names: Iterable[str]) -> str:
    """Several names as one; equal names are counted."""
    counted = Counter(names).items()
    return " and ".join(f"{count} x {name}" if count > 1 else name for name, count in counted)


def hold(device: "torch.device", cap: int | None) -> None:
    """Limit torch's allocator on a GPU to `cap`; on a CPU, a `TensorMeter` does that."""
    import torch

    if device.type == "cpu":
        return
    if cap is None:  # an earlier model may have had a limit
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)


def bandwidth(name: str) -> float | None:
    """A card's memory bandwidth in bytes per second, if the card is known."""
    found = (
        speed
        for part, speed in _BANDWIDTHS.items()
        if re.search(rf"\b{part}\b(?! Ti| SUPER)", name, re.IGNORECASE)
    )
    speed = next(found, None)
    return None if speed is None else speed * 1e9


def margin() -> int:
    """Bytes to leave free on this system."""
    return SPILLING_MARGIN if spills() else MARGIN
