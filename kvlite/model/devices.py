"""Devices, as settings name them. What is no name of any is known without torch."""

import re
from typing import TYPE_CHECKING

from kvlite.errors import SettingError

if TYPE_CHECKING:
    import torch

_NUMBER = "(:(0|[1-9][0-9]?))?"
_CARDS = rf"cuda{_NUMBER}(, *cuda{_NUMBER})*"


def require_device(setting: str) -> None:
    """Raises SettingError if a setting names no device. A GPU that is not here may be planned
    for."""
    if re.fullmatch(rf"auto|all|cpu{_NUMBER}|{_CARDS}", setting) is None:
        raise _unknown(setting)


def choose_devices(setting: str, option: str = "--device") -> "tuple[torch.device, ...]":
    """The devices of a setting: one as of `choose_device`, some with commas between, or `all` CUDA
    devices. Raises SettingError if one is not here, or a card is named twice."""
    import torch

    if setting == "all":
        found = tuple(torch.device("cuda", number) for number in range(torch.cuda.device_count()))
        if not found:
            raise SettingError(
                f"{option} all: torch sees no CUDA device here: name cards, as "
                "cuda:0,cuda:1, to plan for them, or leave it out"
            )
        return found
    named = tuple(choose_device(name.strip()) for name in setting.split(","))
    for device in named:
        if device.type == "cuda" and named.count(device) > 1:
            raise SettingError(f"{option} {setting} names {device} twice: name each card once")
    return named


def choose_device(device: str) -> "torch.device":
    """The device a setting names, a GPU with its number; `auto` is the first GPU if there is one.
    Raises SettingError if no such device here."""
    import torch

    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if re.fullmatch(f"(cpu|cuda){_NUMBER}", device) is None:
        raise _unknown(device)
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise SettingError(
            f"device {device!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices "
            "(use --device cpu)"
        )
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen


def _unknown(device: str) -> SettingError:
    return SettingError(
        f"unknown device {device!r}: use auto, cpu or cuda, or several cards as cuda:0,cuda:1"
    )
