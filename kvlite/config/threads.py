"""How many threads compute, and how they wait, for programs: decided before torch is imported.

OpenMP's threads spin while they wait for each other. On a machine that does anything else they then
keep from its core the one they wait for: a token takes many times as long (`docs/benchmarks.md`).
Asleep, they need not be fewer, so that sums are split, and rounded, the same way however busy the
machine is.
"""

import os
from math import ceil
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def set_threads() -> None:
    """Let threads sleep while they wait, and be no more than a container's share of the processor.
    What the environment says already stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    share = processor_share()
    if share is not None and share < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, ceil(share))))


def processor_share(cgroups: Path = CGROUPS, own: Path = OWN) -> float | None:
    """Processors that control groups leave this process, which OpenMP does not look at; None if
    they set no limit.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, `cpu.max`.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
    shares = []
    for folder in (cgroups / path, *(cgroups / path).parents):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota.isdigit() and period.isdigit() and int(period):
            shares.append(int(quota) / int(period))
    return min(shares, default=None)
