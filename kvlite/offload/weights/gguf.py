"""Models read from GGUF files, tensor by tensor: packed as in the file, or converted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn

from kvlite.errors import require_uncancelled
from kvlite.model.gguf_index import GGUFIndex, GGUFReader
from kvlite.model.making import making_modules
from kvlite.model.packing import keep_packed, pack_linears
from kvlite.model.quantizing import quantize_layer
from kvlite.model.skeleton import empty_module
from kvlite.model.weights import PLAIN, Weights


def open_gguf(
    folder: Path,
    index: GGUFIndex,
    *,
    device: torch.device,
    weights: Weights,
    cards: Sequence[torch.device] = (),
    cancel: Event | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A transformers model with the weights of a GGUF file, and loading info like transformers'.
    While loading, memory holds one tensor more than the model, or one layer if it is quantized.

    Args:
        cards: the device of each layer, if these are on several.

    Raises:
        Stopped: `cancel` was set.
        ModelError: the file was changed.
    """
    module = empty_module(folder, weights)
    layers = [(f"model.layers.{index}.", card) for index, card in enumerate(cards)]

    def device_of(name: str) -> torch.device:
        return next((card for layer, card in layers if name.startswith(layer)), device)

    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    if module.config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    missing = {name for name in shapes if name not in index.tensors}
    misfits = {
        name for name in shapes.keys() - missing if index.tensors[name].stored.shape != shapes[name]
    }
    if not missing and not misfits:
        with index.reading() as reader:
            _fill(module, reader, device_of, weights, cancel)
    if isinstance(module.model.embed_tokens, nn.Embedding):
        with making_modules():
            module.tie_weights(
                missing_keys={"lm_head.weight"} - shapes.keys(), recompute_mapping=False
            )
    for within, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device_of(f"{within}.")))
    module.eval().requires_grad_(False)
    return module, {
        "missing_keys": missing,
        "mismatched_keys": {(name,) for name in misfits},
        "unexpected_keys": set(),
    }


def _fill(
    module: Any,
    reader: GGUFReader,
    device_of: Callable[[str], torch.device],
    weights: Weights,
    cancel: Event | None,
) -> None:
    def numbers(within: nn.Module, prefix: str) -> None:
        """Fill the parameters that do not stay packed."""
        for name, empty in [*within.named_parameters()]:
            tensor = reader.index.tensors.get(prefix + name)
            stays = tensor is None or (weights.index is not None and tensor.form is not None)
            if stays or not empty.is_meta:
                continue
            require_uncancelled(cancel)
            owner, _, own = name.rpartition(".")
            whole = reader.numbers(prefix + name, empty.dtype).to(device_of(prefix + name))
            made = nn.Parameter(whole, requires_grad=False)
            setattr(within.get_submodule(owner), own, made)

    def blocks(name: str, size: tuple[int, int]) -> torch.Tensor:
        require_uncancelled(cancel)
        return reader.blocks(name).to(device_of(name))

    for number, layer in enumerate(module.model.layers):
        numbers(layer, f"model.layers.{number}.")
        if weights.packs and weights.index is None:
            pack_linears(layer, weights.dtype)
        elif not weights.packs and weights.name not in PLAIN:
            quantize_layer(layer, weights)
    numbers(module, "")
    if weights.index is not None:
        keep_packed(module, weights, blocks)
