"""An engine on each of several devices."""

import os
from collections.abc import Iterator, Sequence

import torch

from kvlite.config.settings import Settings
from kvlite.engine.callbacks import Callbacks
from kvlite.jobs.answer import BatchAnswer
from kvlite.jobs.run import Engine, largest
from kvlite.jobs.tasks import Task
from kvlite.jobs.workers import Place, answered_by_workers
from kvlite.memory.device_budget import checkpoint_limit, ram_limit


def answered_on_devices(
    devices: Sequence[torch.device],
    settings: Settings,
    weights: str,
    tasks: Sequence[Task],
    callbacks: Callbacks,
) -> Iterator[BatchAnswer]:
    """As `run.answered`, on several devices; `weights` is as of `Engine`, other args and errors are
    those of `answered_by_workers`."""
    settings, longest = _shared(settings, len(devices)), largest(tasks)
    places = [
        Place(
            str(device),
            (settings.replace({"device": device.type}), weights, longest),
            _environment(device, devices),
        )
        for device in devices
    ]
    return answered_by_workers(Engine, places, tasks, callbacks)


def _shared(settings: Settings, count: int) -> Settings:
    auto = {"recall_limit": ram_limit(None, held=0), "checkpoint_limit": checkpoint_limit(None)}
    shares = {name: f"{limit // count}B" for name, limit in auto.items()}
    return settings.replace(
        {name: share for name, share in shares.items() if getattr(settings, name) == "auto"}
    )


def _environment(device: torch.device, devices: Sequence[torch.device]) -> dict[str, str]:
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = device.index or 0
        return {"CUDA_VISIBLE_DEVICES": visible[number] if visible[0] else str(number)}
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    return {"OMP_NUM_THREADS": str(max(1, threads // devices.count(device)))}
