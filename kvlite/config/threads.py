"""How many threads compute, and how they wait, for programs: decided before torch is imported.

OpenMP's threads spin while they wait for each other. On a machine that does anything else they then
keep from its core the one they wait for: a token takes many times as long. Threads that sleep at
once have to be woken for every product. So they spin for some microseconds and then sleep
(`docs/benchmarks.md` has what each costs). They need not be fewer on a busy machine, so that sums
are split, and rounded, the same way however busy it is.
"""

import os
from math import ceil
from pathlib import Path

# Looks for work before a thread sleeps, as libgomp counts them.
SPINS = 1000
CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def set_threads() -> None:
    """Let threads sleep soon while they wait, and be no more than a container's share of the
    processor. What the environment says already stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
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
