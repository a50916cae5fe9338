"""Models with weights from files: whole, or with streamed decoder layers; and their MTP heads."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from kvlite.config.units import readable
from kvlite.errors import ModelError, SettingError, require_uncancelled
from kvlite.model.cpu import split_linears
from kvlite.model.experts import take_few_in_place
from kvlite.model.files import Stored, fit, parts_of, stored_weights
from kvlite.model.gguf.index import gguf_alone
from kvlite.model.layers import LayerGroup
from kvlite.model.load import LoadedModel, load_module
from kvlite.model.mtp import empty_mtp, stored_name
from kvlite.model.packing import pack_linears
from kvlite.model.quantizing import quantize_experts, quantize_layer
from kvlite.model.shape import read_config, read_shape
from kvlite.model.skeleton import empty_module
from kvlite.model.transformers_lock import making_modules
from kvlite.model.weights import MXFP4, PLAIN, Weights, keep_odd_sizes_unpacked
from kvlite.offload.weights.buffers import (
    FileReader,
    InFiles,
    InMemory,
    Layout,
    lay_out,
    move_unstreamed,
    taken,
)
from kvlite.offload.weights.experts import (
    LEAST,
    ExpertLayer,
    ExpertPool,
    ExpertsInFiles,
    ExpertsInMemory,
    Resident,
    apart,
)
from kvlite.offload.weights.gguf import loading_info, open_gguf, open_gguf_mtp
from kvlite.offload.weights.layers import StreamedLayers
from kvlite.ops.device import has_triton

HOST = torch.device("cpu")
BODY = "model."
LAYERS = f"{BODY}layers."


def require_streamable(
    setting: str, folder: Path, *, device: torch.device, weights: Weights
) -> None:
    """Check `--stream` before any weight is read. Raises SettingError if the model's weights cannot
    be streamed to this device this way."""
    if setting == "off":
        return
    as_stored = weights.name in PLAIN or weights.name == MXFP4
    if weights.stored and not as_stored:
        raise SettingError(
            f"--stream {setting} cannot be had of {folder}, whose weights are {weights.name} "
            "already: name the model they were made from, or leave --stream out"
        )
    if setting == "disk":
        if gguf_alone(folder) is not None:
            raise SettingError(
                f"--stream disk reads safetensors, and the weights of {folder} are in a GGUF file: "
                "leave --stream out"
            )
        if not as_stored:
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
    if not as_stored and weights.name != "nf4":
        raise SettingError(
            f"--stream ram does not move {weights.name} weights: use --weights nf4 or bf16"
        )
    sizes = read_shape(folder).weight_bytes(weights)
    needed = sizes["attention"] + sizes["recurrent"] + sizes["mlp"]
    free = psutil.virtual_memory().available
    if needed > free:
        raise SettingError(
            f"--stream ram would take {readable(needed)} of host memory for the layers of "
            f"{folder}, and {readable(free)} are free: use --stream disk"
        )


def in_files(model: LoadedModel, resident: Resident = LEAST) -> StreamedLayers:
    """Layers read from files in turn, for a model from `open_without_layers`."""
    stored, device = stored_weights(model.path), model.device
    names = [
        BODY if isinstance(layer, LayerGroup) else f"{LAYERS}{index}."
        for index, layer in enumerate(model.layers.modules)
    ]
    layouts, experts = _laid_out(model)
    parts = [
        [(place, parts_of(name + place.name, stored)) for place in layout.places]
        for name, layout in zip(names, layouts, strict=True)
    ]
    source, pool = InFiles(parts, device), None
    if layers := [*chain(*experts)]:
        stacks = [
            [parts_of(name + place.name, stored) for place in each.places]
            for name, found in zip(names, experts, strict=True)
            for each in found
        ]
        pool = ExpertPool(layers, ExpertsInFiles(stacks, device), device, resident.experts)
    given = model.layers.modules, layouts, source, device
    return StreamedLayers(*given, "disk", pool, stay=resident.layers)


def _laid_out(model: LoadedModel) -> tuple[list[Layout], list[list[ExpertLayer]]]:
    device, chosen = model.device, model.shape.chosen_experts
    made = [apart(layer, lay_out(layer, device), chosen) for layer in model.layers.modules]
    return [layout for layout, _ in made], [found for _, found in made]


def in_memory(model: LoadedModel, resident: Resident = LEAST) -> StreamedLayers:
    """Layers copied from host memory in turn, for a model from `open_beside`."""
    modules, device = model.layers.modules, model.device
    layouts, experts = _laid_out(model)
    for layer in modules:
        move_unstreamed(layer, device)
    pool = None
    if layers := [*chain(*experts)]:
        pool = ExpertPool(layers, ExpertsInMemory(layers), device, resident.experts)
    source = InMemory([taken(layout) for layout in layouts])
    return StreamedLayers(modules, layouts, source, device, "ram", pool, stay=resident.layers)


def open_whole(
    folder: Path,
    *,
    device: torch.device,
    weights: Weights,
    cards: Sequence[torch.device] = (),
    cancel: Event | None = None,
    notify: Callable[[str], None] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A transformers model with all weights on the device, and loading info like transformers'.
    `cards` are those of its layers, where these are on several; `notify` is told while it takes
    long. Raises Stopped if `cancel` was set."""
    model_type = read_config(folder)["model_type"]
    index = weights.index or gguf_alone(folder)
    if index is not None:
        given: dict[str, Any] = {"device": device, "weights": weights, "cancel": cancel}
        return open_gguf(folder, index, cards=cards, notify=notify, **given)
    if cards or weights.packs or weights.keeps_experts_packed(model_type):
        return open_by_layer(folder, cards=cards, device=device, weights=weights, cancel=cancel)
    return load_module(folder, device=device, weights=weights)


def open_by_layer(
    folder: Path,
    *,
    device: torch.device,
    weights: Weights,
    cards: Sequence[torch.device] = (),
    cancel: Event | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A transformers model whose layers may be on several devices, with weights in 4 bits
    (`model.packing`) or quantized (`model.quantizing`). At most one layer is in memory unquantized
    at a time. Args are those of `open_whole`. Raises Stopped if `cancel` was set."""
    module, found = open_without_layers(folder, device=device, weights=weights)
    if found["missing_keys"] or found["mismatched_keys"]:
        return module, found
    stored = stored_weights(folder)
    for index, layer in enumerate(module.model.layers):
        require_uncancelled(cancel)
        parts = partial(_parts, stored, f"{LAYERS}{index}.")
        read_and_pack(layer, parts, cards[index] if cards else device, weights)
    if device.type == "cpu":
        keep_odd_sizes_unpacked(module)
    return module, found


def _parts(stored: dict[str, Stored], within: str, name: str) -> list[Stored]:
    return parts_of(within + name, stored)


def read_and_pack(
    layer: nn.Module,
    parts: Callable[[str], list[Stored]],
    device: torch.device,
    weights: Weights,
) -> None:
    """Read a layer, of which `parts` says where each parameter lies in files, and keep only its
    packed weights."""
    layout = lay_out(layer, device)
    memory = torch.empty(layout.size, dtype=torch.uint8, device=device)
    layout.bind(memory)
    source = InFiles([[(place, parts(place.name)) for place in layout.places]], device)
    with closing(source.reader):
        source.bring(0, memory)
    move_unstreamed(layer, device)
    if weights.packs:
        pack_linears(layer, weights.dtype)
    elif not weights.stored and weights.name not in PLAIN:
        quantize_layer(layer, weights)
    if weights.name in PLAIN:
        return
    first = memory.data_ptr()
    for parameter in layer.parameters():
        if first <= parameter.data_ptr() < first + layout.size:
            parameter.data = parameter.data.clone()  # a norm would hold all of the memory


def open_beside(
    folder: Path, *, device: torch.device, weights: Weights
) -> tuple[Any, dict[str, Any]]:
    """A transformers model whose decoder layers are in host memory, the rest on the device."""
    module, found = open_whole(folder, device=HOST, weights=weights)
    layers, module.model.layers = module.model.layers, nn.ModuleList()
    module.to(device)
    module.model.layers = layers
    return module, found


def open_without_layers(
    folder: Path, *, device: torch.device, weights: Weights
) -> tuple[Any, dict[str, Any]]:
    """A transformers model whose decoder layers are on the meta device, the rest on `device`, after
    a check that the files have all weights; and loading info like transformers'."""
    module = empty_module(folder, weights)
    if weights.name == MXFP4:
        quantize_experts(module, weights)
    stored = stored_weights(folder)
    state = module.state_dict(keep_vars=True)
    made = {name: parts_of(name, stored) for name in state}
    missing = {name for name, parts in made.items() if not parts}
    misfits = {name for name, parts in made.items() if parts and not fit(parts, state[name].shape)}
    fitting = {name: made[name] for name in made.keys() - missing - misfits}
    _require_plain(fitting, state)
    _read_the_rest(module, fitting, device)
    with making_modules():
        module.tie_weights(missing_keys=missing, recompute_mapping=False)
    module.eval().requires_grad_(False)
    return module, loading_info(missing, misfits)


def _read_the_rest(module: Any, made: dict[str, list[Stored]], device: torch.device) -> None:
    buffers = dict(module.named_buffers())
    resident = {
        name: parts
        for name, parts in made.items()
        if name in buffers or not name.startswith(LAYERS)
    }
    every = (part for parts in resident.values() for part in parts)
    with closing(FileReader(every, device)) as reader:
        for name, parts in resident.items():
            owner, _, own = name.rpartition(".")
            empty = buffers.get(name)
            if empty is None:
                empty = module.get_parameter(name)
            whole = torch.empty(empty.shape, dtype=empty.dtype, device=device)
            reader.read(parts, whole.view(-1))
            if name not in buffers:
                whole = nn.Parameter(whole, requires_grad=False)
            setattr(module.get_submodule(owner), own, whole)
    move_unstreamed(module, device)


def _require_plain(made: dict[str, list[Stored]], state: dict[str, Tensor]) -> None:
    for name, parts in made.items():
        for part in parts:
            dtype, wanted = part.dtype, state[name].dtype
            if dtype is None or dtype.is_floating_point != wanted.is_floating_point:
                raise ValueError(
                    f"{name} is stored as {part.kind}, which --stream disk cannot read"
                )


# By the setting: what opens a model, for `load_model`, and then lets its layers come.
STREAMED = {"disk": (open_without_layers, in_files), "ram": (open_beside, in_memory)}


def load_mtp(model: LoadedModel) -> bool:
    """Load the head of a model that has one, as its layers were, or as it is in quantized files;
    whether these have it, in numbers that are not quantized. Raises ModelError if other files have
    only some of it, or of another size."""
    head = empty_mtp(model.module, model.dtype)
    if (index := model.weights.index or gguf_alone(model.path)) is not None:
        given: dict[str, Any] = {"device": model.device, "weights": model.weights}
        return open_gguf_mtp(head, index, **given) and _keep(model, head)
    stored = stored_weights(model.path)
    made = {name: parts_of(stored_name(name), stored) for name, _ in head.named_parameters()}
    if not any(made.values()):
        return False
    for name, parameter in head.named_parameters():
        parts = made[name]
        whole = parts and all(each.dtype is not None for each in parts)
        if not whole or not fit(parts, parameter.shape):
            if model.weights.stored:
                return False
            raise ModelError(
                f"the model in {model.path} has no {stored_name(name)} of the size that its config "
                "says: get the model again, or use --speculate off"
            )
    read_and_pack(head, lambda name: made[name], model.device, model.weights)
    # All of it would stay where some of it gets a new layout.
    if model.device.type == "cpu" and model.weights.config is None:
        for parameter in head.parameters():
            parameter.data = parameter.data.clone()
    return _keep(model, head)


def _keep(model: LoadedModel, head: Any) -> bool:
    if model.device.type == "cpu":
        split_linears(head)
    if has_triton(model.device):
        take_few_in_place(head)
    model.mtp = head
    return True
