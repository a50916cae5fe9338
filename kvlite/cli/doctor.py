"""`kvlite doctor`: what this machine has, how fast it is, and the remedy for what is missing."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from kvlite.cli.console import output, print_json
from kvlite.cli.options import AsJson
from kvlite.cli.screen import console
from kvlite.config.paths import (
    cache_folder,
    config_folder,
    data_folder,
    models_folder,
    nearest_folder,
    require_writable,
)
from kvlite.config.threads import processor_share
from kvlite.config.units import readable
from kvlite.errors import sentence
from kvlite.memory import nvml
from kvlite.model.local_models import bytes_of, leftovers

if TYPE_CHECKING:
    from kvlite.memory.speeds import Speeds

# Less than this is not enough to download a model.
DISK = 10 << 30
# Weights of an 8B model in 16 bits.
WEIGHTS_8B = 16.1e9
CUDA_TORCH = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
)

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        state: a "note" is worth knowing; a "problem" keeps something from working.
        found: in a few words.
        remedy: what to do about it; empty if nothing has to be done.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="measure no speeds, which takes some seconds")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine: card, driver, torch, memory, disk, threads, and how fast they are.

    Each thing that is missing comes with its remedy. The exit code is 1 if there is a problem.

    Examples:

      kvlite doctor

      kvlite doctor --quick

      kvlite doctor --json
    """
    screen = console()
    speeds: dict[str, Speeds | str] = {}
    with screen.status("Looking at this machine"):
        checks = list(checks_of_this_machine())
    import torch

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    for device in [] if quick else devices:
        with screen.status(f"Measuring {device}"):
            speeds[device] = _measured(device)
    if as_json:
        plain = {
            device: found if isinstance(found, str) else asdict(found)
            for device, found in speeds.items()
        }
        print_json({"checks": [asdict(each) for each in checks], "speeds": plain})
    else:
        _show(checks, speeds)
    if any(each.state == "problem" for each in checks):
        raise typer.Exit(1)


def checks_of_this_machine() -> Iterator[Check]:
    """Everything but speeds, in the order in which it is shown."""
    found = nvml.cards()
    system = "WSL" if nvml.in_wsl() else platform.system()
    yield Check("Python", "ok", f"{platform.python_version()} on {system} {platform.machine()}")
    yield from _cards(found)
    yield _torch(found)
    yield from _packages(bool(found))
    yield _host_memory()
    yield from _folders()
    if old := leftovers():
        about = f"{readable(sum(map(bytes_of, old)))} of GGUF files, converted by an older kvlite"
        yield Check("copies", "note", about, "kvlite models clean")
    yield _threads()


def _cards(found: list[nvml.Card]) -> Iterator[Check]:
    if not found:
        about = "no NVIDIA card, or no driver for it: the processor computes"
        remedy = "if this machine has one, install NVIDIA's driver: nvidia-smi then lists it" + (
            " (in Windows, not in WSL)" if nvml.in_wsl() else ""
        )
        yield Check("card", "note", about, remedy)
    for card in found:
        about = f"{card.name}, {readable(card.total)}, {readable(card.free)} free"
        others = card.free < 0.8 * card.total
        remedy = "close other programs that use it (nvidia-smi lists them)" if others else ""
        yield Check("card", "note" if others else "ok", about, remedy)
    if found:
        about = f"{found[0].driver}, for CUDA {found[0].cuda} and older"
        yield Check("driver", "ok", about)


def _torch(found: list[nvml.Card]) -> Check:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the processor alone"
    about = f"{torch.__version__}, built for {built}"
    if not found or torch.cuda.is_available():
        return Check("torch", "ok", about)
    if torch.version.cuda is None:
        return Check("torch", "problem", f"{about}: it cannot use the card", CUDA_TORCH)
    newer = f"update the driver, which is for CUDA {found[0].cuda}, or install a torch built for it"
    return Check("torch", "problem", f"{about}: it cannot use the card", newer)


def _packages(on_card: bool) -> Iterator[Check]:
    triton = "triton-windows" if sys.platform == "win32" else "triton"
    wanted = [
        ("triton", "compiled attention on a card", on_card, f"pip install {triton}"),
        ("bitsandbytes", "--weights nf4 and int8", on_card, "pip install bitsandbytes"),
        ("numba", "compiled loops on a processor", not on_card, "pip install numba"),
    ]
    for name, use, matters, remedy in wanted:
        if find_spec(name) is None:
            yield Check(name, "problem" if matters else "ok", f"missing: {use}", matters * remedy)
            continue
        try:
            about = version(name)
        except PackageNotFoundError:
            about = "there"
        yield Check(name, "ok", f"{about}: {use}")


def _host_memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    about = f"{readable(memory.total)}, {readable(memory.available)} free"
    return Check("host memory", "ok", f"{about}: holds what the cache drops")


def _folders() -> Iterator[Check]:
    folders = {
        "cache": cache_folder(),
        "data": data_folder(),
        "models": models_folder(),
        "settings": config_folder(),
    }
    for name, folder in folders.items():
        variable = "KVLITE_" + {"settings": "CONFIG"}.get(name, name.upper())
        try:
            require_writable(folder)
        except OSError as error:
            remedy = f"make it writable, or name another folder by {variable}"
            yield Check(name, "problem", f"{folder}: {error.strerror}", remedy)
            continue
        free, taken = shutil.disk_usage(nearest_folder(folder)).free, _size(folder)
        about = f"{folder}: {readable(taken)}, {readable(free)} free on its disk"
        short = name == "cache" and free < DISK
        remedy = f"free some, or name a folder on another disk by {variable}" if short else ""
        yield Check(name, "note" if short else "ok", about, remedy)


def _threads() -> Check:
    import torch

    count, own = torch.get_num_threads(), os.cpu_count() or 1
    share, busy = processor_share(), _load()
    about = f"{count} compute, of {own} processors"
    if share is not None and share < own:
        about += f", of which this container has {share:g}"
    if busy > 0.5 * own:
        remedy = "answers on a CPU are slower while other programs compute: close those"
        return Check("threads", "note", f"{about}; {busy:.1f} busy with other work", remedy)
    return Check("threads", "ok", about)


def _load() -> float:
    """Processors that were busy in the last minute; 0 where nobody counts them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _size(folder: Path) -> int:
    total = 0
    for where, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(where, file)).st_size
            except OSError:  # removed meanwhile
                continue
    return total


def _measured(device: str) -> "Speeds | str":
    import torch

    from kvlite.memory.speeds import measure_speeds

    try:
        return measure_speeds(torch.device(device))
    except (RuntimeError, MemoryError) as error:
        return sentence(error)


def _show(checks: list[Check], speeds: "dict[str, Speeds | str]") -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for check in checks:
        found = check.found + (f"\nRemedy: {check.remedy}." if check.remedy else "")
        table.add_row(Text(check.state, styles[check.state]), check.name, found)
    for device, speed in speeds.items():
        table.add_row("", f"{device} speed", speed if isinstance(speed, str) else _told(speed))
    output().print(table)


def _told(speed: "Speeds") -> str:
    told = f"memory {speed.memory_bytes / 1e9:,.0f} GB/s"
    if speed.transfer_bytes is not None:
        told += f", from host memory {speed.transfer_bytes / 1e9:,.1f} GB/s"
    told += f", products {speed.operations / 1e12:,.2f} TFLOP/s"
    tokens = speed.memory_bytes / WEIGHTS_8B
    return f"{told}: at most {tokens:,.1f} tokens/s of an 8B model in 16 bits"
