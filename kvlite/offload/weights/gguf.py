"""Models read from GGUF files, tensor by tensor: packed as in the file, or converted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn

from kvlite.errors import require_uncancelled
from kvlite.model.gguf.index import GGUFIndex, GGUFReader
from kvlite.model.packing import keep_packed, pack_linears
from kvlite.model.quantizing import quantize_layer
from kvlite.model.skeleton import empty_module
from kvlite.model.transformers_lock import making_modules
from kvlite.model.weights import PLAIN, Weights

# Seconds between two sentences on how far loading is.
EVERY = 2.0


def open_gguf(
    folder: Path,
    index: GGUFIndex,
    *,
    device: torch.device,
    weights: Weights,
    cards: Sequence[torch.device] = (),
    cancel: Event | None = None,
    notify: Callable[[str], None] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A transformers model with the weights of a GGUF file, and loading info like transformers'.
    While loading, memory holds one tensor more than the model, or one layer if it is quantized.

    Args:
        cards: the device of each layer, if these are on several.
        notify: called with a sentence every two seconds.

    Raises:
        Stopped: `cancel` was set.
        ModelError: the file was changed.
    """
    module = empty_module(folder, weights)
    layers = [(f"model.layers.{index}.", card) for index, card in enumerate(cards)]

    def device_of(name: str) -> torch.device:
        return next((card for layer, card in layers if name.startswith(layer)), device)

    shapes = {name: tuple(each.shape) for name, each in module.state_dict().items()}
    if module.config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    missing = {name for name in shapes if name not in index.tensors}
    misfits = {
        name for name in shapes.keys() - missing if index.tensors[name].shape != shapes[name]
    }
    if not missing and not misfits:
        with index.reading() as reader:
            _fill(module, _Filling(reader, device_of, weights, cancel), notify)
    if isinstance(module.get_input_embeddings(), nn.Embedding):
        with making_modules():
            module.tie_weights(
                missing_keys={"lm_head.weight"} - shapes.keys(), recompute_mapping=False
            )
    for within, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device_of(f"{within}.")))
    module.eval().requires_grad_(False)
    return module, loading_info(missing, misfits)


def loading_info(missing: set[str], misfits: set[str]) -> dict[str, Any]:
    """Like transformers': parameters that files lack, or have in another size."""
    named = {"mismatched_keys": {(name,) for name in misfits}, "unexpected_keys": set()}
    return {"missing_keys": missing, **named}


def open_gguf_mtp(
    head: nn.Module, index: GGUFIndex, *, device: torch.device, weights: Weights
) -> bool:
    """Fill a model's MTP head; whether the file has one. Raises ModelError if it was changed."""
    if not any(name.startswith("mtp.") for name in index.tensors):
        return False
    with index.reading() as reader:
        read = _Filling(reader, lambda name: device, weights, None)
        read.numbers(head, "mtp.")
        read.pack(head, "mtp.")
    return True


@dataclass
class _Filling:
    """Reads what a module needs, one tensor at a time."""

    reader: GGUFReader
    device_of: Callable[[str], torch.device]
    weights: Weights
    cancel: Event | None

    def numbers(self, within: nn.Module, prefix: str) -> None:
        """Fill the parameters and buffers that do not stay packed."""
        tensors = self.reader.index.tensors
        for name, empty in [*within.named_parameters(), *within.named_buffers()]:
            tensor = tensors.get(prefix + name)
            if tensor is None or (self.weights.index is not None and tensor.forms):
                continue
            is_parameter = isinstance(empty, nn.Parameter)
            if is_parameter and not empty.is_meta:
                continue
            require_uncancelled(self.cancel)
            owner, _, own = name.rpartition(".")
            whole = self.reader.numbers(prefix + name, empty.dtype)
            whole = whole.to(self.device_of(prefix + name))
            made = nn.Parameter(whole, requires_grad=False) if is_parameter else whole
            setattr(within.get_submodule(owner), own, made)

    def pack(self, within: nn.Module, prefix: str) -> None:
        """Pack what is to be packed of a module with all its numbers."""
        if self.weights.index is not None:
            keep_packed(within, self.weights, self._blocks, self.reader.columns, prefix)
        elif self.weights.packs:
            pack_linears(within, self.weights.dtype)
        elif self.weights.name not in PLAIN:
            quantize_layer(within, self.weights)

    def _blocks(self, name: str) -> list[torch.Tensor]:
        require_uncancelled(self.cancel)
        return [found.to(self.device_of(name)) for found in self.reader.blocks(name)]


def _fill(module: Any, filling: _Filling, notify: Callable[[str], None] | None) -> None:
    said, name = time.monotonic(), filling.reader.index.path.name
    for number, layer in enumerate(module.model.layers):
        if notify is not None and time.monotonic() > said + EVERY:
            said = time.monotonic()
            notify(f"Loading {name}: layer {number} of {len(module.model.layers)}")
        filling.numbers(layer, f"model.layers.{number}.")
        if filling.weights.index is None:
            filling.pack(layer, "")
    filling.numbers(module, "")
    if filling.weights.index is not None:
        filling.pack(module, "")
