"""From settings to a planner: the model, the device, and the choices left open."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import torch

from kvlite.config.settings import Settings
from kvlite.errors import SettingError, require_uncancelled
from kvlite.memory.device_budget import DeviceBudget, card, device_budget, together
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.calibration import find_calibration
from kvlite.model.devices import choose_devices
from kvlite.model.gguf.index import read_index
from kvlite.model.shape import PLACE, described, read_config
from kvlite.model.source import find_config
from kvlite.model.weights import PLAIN, Weights, choose_weights, stored_name
from kvlite.offload.weights.loader import require_streamable
from kvlite.planner.cards import layable, require_cards
from kvlite.planner.forecaster import Forecaster
from kvlite.planner.planner import Planner


def open_planner(
    settings: Settings,
    notify: Callable[[str], None] | None = None,
    *,
    card: str = "",
    reads_text: bool = False,
    cancel: Event | None = None,
) -> Planner:
    """A planner from a model's config alone, also for a GPU that is not in this machine.

    Args:
        notify: called before a download.
        card: the name of that GPU.
        reads_text: load the tokenizer, so that texts can be counted in tokens.
        cancel: set it to stop this, and plans in progress.

    Raises:
        ModelError: the config is missing, broken, or of an unsupported model.
        SettingError: a setting is out of range, or does not fit the model.
        Stopped: `cancel` was set.
    """
    config = EngineConfig.from_settings(settings)
    folder = find_config(settings.model, notify, cancel)
    if not card and not _elsewhere(settings):
        devices = choose_devices(settings.device)
        return planner_here(config, folder, devices, reads_text=reads_text, cancel=cancel)
    cards = (
        len(choose_devices("all")) if settings.device == "all" else settings.device.count(",") + 1
    )
    room = together([_room(config, card)] * cards)
    load_options = [
        (stream, weights)
        for stream in _streams(settings, room)
        for weights in _weights_elsewhere(settings, folder)
    ]
    return _planner(config, folder, room, load_options, reads_text, cancel)


def planner_here(
    config: EngineConfig,
    folder: Path,
    devices: Sequence[torch.device],
    *,
    reads_text: bool,
    freed: int = 0,
    cancel: Event | None = None,
) -> Planner:
    """A planner for the model in a folder, on devices of this machine, where `freed` bytes more
    will be free before it is loaded; otherwise as `open_planner`."""
    freed //= len(devices)
    room = together([device_budget(device, config.vram, freed) for device in devices])
    load_options = load_options_here(config.settings, devices[0], folder, room)
    return _planner(config, folder, room, load_options, reads_text, cancel)


def _planner(
    engine_config: EngineConfig,
    folder: Path,
    room: DeviceBudget,
    load_options: Sequence[tuple[str, Weights]],
    reads_text: bool,
    cancel: Event | None,
) -> Planner:
    require_uncancelled(cancel)
    config, shape = described(folder)
    require_uncancelled(cancel)
    tokenizer = read_tokenizer(folder) if reads_text else None
    require_uncancelled(cancel)
    forecaster = Forecaster(
        config, shape, find_calibration(folder), tokenizer, on_cpu=room.kind == "cpu"
    )
    in_files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if room.cards:
        require_cards(engine_config, shape, len(room.cards))
        load_options = layable(load_options, shape, engine_config.settings)
    return Planner(forecaster, room, engine_config, load_options, in_files, cancel)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of the model in a folder; None if it cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **PLACE)
    except Exception:  # libraries fail in many ways over a stranger's file
        return None


def load_options_here(
    settings: Settings, device: torch.device, folder: Path, room: DeviceBudget
) -> list[tuple[str, Weights]]:
    """The `stream` values (off, ram, disk) and weight formats that work for a model on a device of
    this machine, best first.

    Raises:
        SettingError: the settings leave nothing that works here.
    """
    first = choose_weights(settings.weights, device, folder)
    found = [first]
    if settings.weights == "auto" and first.packs and device.type == "cpu":
        found.append(choose_weights("fp32", device, folder))  # which can be read layer by layer
    shrinks = find_spec("bitsandbytes") is not None
    if settings.weights == "auto" and not first.stored and device.type == "cuda" and shrinks:
        found.append(choose_weights("nf4", device, folder))
    load_options, refused = [], list[SettingError]()
    for stream in _streams(settings, room):
        for weights in found:
            try:
                require_streamable(stream, folder, device=device, weights=weights)
            except SettingError as error:
                refused.append(error)
                continue
            load_options.append((stream, weights))
    if not load_options:
        raise refused[0]
    return load_options


def _streams(settings: Settings, room: DeviceBudget) -> tuple[str, ...]:
    if settings.stream != "auto":
        return (settings.stream,)
    if room.cards:
        return ("off",)
    return ("off", "disk") if room.kind == "cpu" else ("off", "ram", "disk")


def _elsewhere(settings: Settings) -> bool:
    """Whether to plan for a GPU that this machine does not have."""
    if settings.device == "cpu" or torch.cuda.is_available():
        return False
    return settings.vram != "auto" or settings.device.startswith("cuda")


def _room(config: EngineConfig, name: str) -> DeviceBudget:
    settings = config.settings
    if config.vram is None:
        raise SettingError(
            f"{name or f'--device {settings.device}'} is not here: say how much memory it has, as "
            "in --vram 24GiB"
        )
    return card(config.vram, name or f"a card of {settings.vram}")


def _weights_elsewhere(settings: Settings, folder: Path) -> list[Weights]:
    half = torch.bfloat16
    if stored := read_config(folder).get("quantization_config"):
        return [Weights(stored_name(stored), half, stored=True)]
    if settings.weights in PLAIN:
        return [Weights(settings.weights, PLAIN[settings.weights])]
    index = read_index(folder) if settings.weights in ("auto", "gguf") else None
    packed = [] if index is None or not index.is_quantized else [Weights("gguf", half, index=index)]
    if settings.weights == "auto":
        plain = [] if packed else [Weights("bf16", half)]
        return [*packed, *plain, Weights("nf4", half), Weights("int8", half)]
    return packed or [Weights(settings.weights, half)]
