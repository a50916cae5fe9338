"""A model whose decoder layers come to the device in turn (`--stream`)."""

from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import torch
from torch import nn

from kvlite.config.units import readable
from kvlite.errors import SettingError
from kvlite.model.attention_interface import ATTENTION, register_attention
from kvlite.model.calibration import Calibration
from kvlite.model.files import Stored, fit, parts_of, stored_weights
from kvlite.model.load import PLACE, LoadedModel, load_model, load_module
from kvlite.model.making import making_modules
from kvlite.model.shape import read_shape
from kvlite.model.weights import PLAIN, Weights
from kvlite.offload.weights.files import FileReader
from kvlite.offload.weights.layers import StreamedLayers
from kvlite.offload.weights.slots import lay_out
from kvlite.offload.weights.sources import InFiles, InMemory, move_scales, taken

HOST = torch.device("cpu")
LAYERS = "model.layers."


def require_streamable(
    setting: str, folder: Path, *, device: torch.device, weights: Weights
) -> None:
    """Check what can be checked of `--stream` before a weight is read.

    Raises:
        SettingError: the model's weights cannot come from there to this device.
    """
    if setting == "off":
        return
    if weights.stored:
        raise SettingError(
            f"--stream {setting} cannot be had of {folder}, whose weights are {weights.name} "
            "already: name the model they were made from, or leave --stream out"
        )
    if setting == "disk":
        if weights.name not in PLAIN:
            raise SettingError(
                f"--stream disk reads weights as the files have them, and they are not "
                f"{weights.name} there: leave --weights out"
            )
        return
    if device.type == "cpu":
        raise SettingError(
            "--stream ram would bring weights from host memory to host memory, which is the "
            "device here (cpu): use --stream disk"
        )
    if weights.name not in (*PLAIN, "nf4"):
        raise SettingError(
            f"--stream ram does not move {weights.name} weights: use --weights nf4 or bf16"
        )
    sizes = read_shape(folder).weight_bytes(weights)
    needed, free = sizes["attention"] + sizes["mlp"], psutil.virtual_memory().available
    if needed > free:
        raise SettingError(
            f"--stream ram would take {readable(needed)} of host memory for the layers of "
            f"{folder}, and {readable(free)} are free: use --stream disk"
        )


def load_streamed(
    setting: str,
    folder: Path,
    *,
    device: torch.device,
    weights: Weights,
    calibration: Calibration | None = None,
    tokenizer: Any = None,
    cancel: Event | None = None,
) -> LoadedModel:
    """As `load_model`, with decoder layers that come to the device when their turn comes; the rest
    of the model stays there.

    Args:
        setting: ram keeps the layers in host memory, disk leaves them in their files.

    Raises:
        ModelError: as `load_model`, or a file is changed meanwhile.
    """
    opened = open_without_layers if setting == "disk" else open_beside
    model = load_model(
        folder,
        device=device,
        weights=weights,
        calibration=calibration,
        tokenizer=tokenizer,
        opened=opened,
        cancel=cancel,
    )
    model.layers = (in_files if setting == "disk" else in_memory)(model)
    return model


def in_files(model: LoadedModel) -> StreamedLayers:
    """The layers of a model that was opened without, read from its files in turn."""
    modules, stored = model.layers.modules, stored_weights(model.path)
    layouts = [lay_out(layer, model.device) for layer in modules]
    source = InFiles(
        [
            [(place, parts_of(f"{LAYERS}{index}.{place.name}", stored)) for place in layout.places]
            for index, layout in enumerate(layouts)
        ],
        model.device,
    )
    return StreamedLayers(modules, layouts, source, model.device, "disk")


def in_memory(model: LoadedModel) -> StreamedLayers:
    """The layers of a model that has them in host memory, copied from there in turn."""
    modules = model.layers.modules
    layouts = [lay_out(layer, model.device) for layer in modules]
    for layer in modules:
        move_scales(layer, model.device)
    source = InMemory([taken(layout) for layout in layouts])
    return StreamedLayers(modules, layouts, source, model.device, "ram")


def open_beside(
    folder: Path, *, device: torch.device, weights: Weights
) -> tuple[Any, dict[str, Any]]:
    """A transformers model whose decoder layers are in host memory, the rest on the device."""
    module, found = load_module(folder, device=HOST, weights=weights)
    layers, module.model.layers = module.model.layers, nn.ModuleList()
    module.to(device)
    module.model.layers = layers
    return module, found


def open_without_layers(
    folder: Path, *, device: torch.device, weights: Weights
) -> tuple[Any, dict[str, Any]]:
    """A transformers model whose decoder layers' weights are nowhere, the rest on the device; that
    the files have them is made sure of.

    Returns:
        The module, and what was found of its weights, as transformers tells it.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    register_attention()
    config = AutoConfig.from_pretrained(folder, **PLACE)
    with making_modules(), init_empty_weights(include_buffers=False):
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=weights.dtype, attn_implementation=ATTENTION
        )
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    stored = stored_weights(folder)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    made = {name: parts_of(name, stored) for name in parameters}
    missing = {name for name, parts in made.items() if not parts}
    misfits = {
        name for name, parts in made.items() if parts and not fit(parts, parameters[name].shape)
    }
    fitting = {name: made[name] for name in made.keys() - missing - misfits}
    _require_plain(fitting)
    _read_the_rest(module, fitting, device)
    with making_modules():
        module.tie_weights(missing_keys=missing, recompute_mapping=False)
    module.eval().requires_grad_(False)
    return module, {
        "missing_keys": missing,
        "mismatched_keys": {(name,) for name in misfits},
        "unexpected_keys": set(),
    }


def _read_the_rest(module: Any, made: dict[str, list[Stored]], device: torch.device) -> None:
    """Read what is no decoder layer's, and put buffers beside it."""
    resident = {name: parts for name, parts in made.items() if not name.startswith(LAYERS)}
    paths = {part.path for parts in resident.values() for part in parts}
    with closing(FileReader(paths, device)) as reader:
        for name, parts in resident.items():
            owner, _, own = name.rpartition(".")
            empty = module.get_parameter(name)
            whole = torch.empty(empty.shape, dtype=empty.dtype, device=device)
            reader.read(parts, whole.view(-1))
            setattr(module.get_submodule(owner), own, nn.Parameter(whole, requires_grad=False))
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def _require_plain(made: dict[str, list[Stored]]) -> None:
    for name, parts in made.items():
        for part in parts:
            if part.dtype is None:
                raise ValueError(
                    f"{name} is stored as {part.kind}, which --stream disk cannot read"
                )
