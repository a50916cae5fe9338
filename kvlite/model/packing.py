"""Weights that stay packed as a GGUF file has them, or are packed in 4 bits while they are read."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlite.model.experts import PROJECTIONS, is_experts, take_one_by_one
from kvlite.model.packed_experts import BlockExperts
from kvlite.model.packed_linear import PackedEmbedding, PackedLinear, PackedWeights
from kvlite.ops.blocks import FORMATS, GROUP

if TYPE_CHECKING:
    from kvlite.model.weights import Weights

ROUNDED_TO = FORMATS["Q4_1"]
_EMBEDDINGS = ("model.embed_tokens", "model.embeddings")


def pack(module: Any, weights: "Weights") -> None:
    """Pack what is to be packed of a transformers model on the meta device."""
    if weights.index is None:
        pack_linears(module.model.layers, weights.dtype)
    else:
        tensors = weights.index.tensors
        keep_packed(
            module,
            weights,
            lambda name: [
                torch.empty(size, dtype=torch.uint8, device="meta")
                for size in tensors[name].block_sizes
            ],
        )


def keep_packed(
    module: Any,
    weights: "Weights",
    blocks: Callable[[str], Sequence[Tensor]],
    columns: Callable[[str], Tensor | None] = lambda name: None,
    prefix: str = "",
) -> None:
    """Replace, in place, every linear layer, embedding and stack of experts of a model that its
    file has in blocks.

    Args:
        blocks: gives them, of a parameter's name, as `GGUFTensor.block_sizes` says.
        columns: gives the order of a linear layer's inputs, if it has one.
        prefix: what the names of a part of a model begin with.
    """
    assert weights.index is not None
    tensors = weights.index.tensors
    for name, child in [*module.named_modules()]:
        within = f"{prefix}{name}"
        if isinstance(child, nn.Linear | nn.Embedding):
            weight = f"{within}.weight"
            if weight not in tensors or not tensors[weight].forms:
                continue
            (found,), (form,) = blocks(weight), tensors[weight].forms
            packed = PackedWeights(found, form, weights.dtype)
            _replace(module, name, child, packed, columns(weight))
            if name in _EMBEDDINGS and module.config.tie_word_embeddings:
                module.lm_head = PackedLinear(packed)
        elif is_experts(child):
            _pack_experts(child, f"{within}.", weights, blocks)


def _pack_experts(
    experts: Any, prefix: str, weights: "Weights", blocks: Callable[[str], Sequence[Tensor]]
) -> None:
    assert weights.index is not None
    packed = False
    for name in PROJECTIONS:
        tensor = weights.index.tensors.get(prefix + name)
        if tensor is None or not tensor.forms:
            continue
        pieces = [*zip(blocks(prefix + name), tensor.forms, strict=True)]
        delattr(experts, name)
        made = BlockExperts(pieces, weights.dtype, transposed=tensor.transposed)
        setattr(experts, name, made)
        packed = True
    if packed:
        take_one_by_one(experts)


def _replace(
    module: nn.Module, name: str, child: Any, packed: PackedWeights, columns: Tensor | None
) -> None:
    owner, _, own = name.rpartition(".")
    if isinstance(child, nn.Embedding):
        made: nn.Module = PackedEmbedding(packed, getattr(child, "embed_scale", None))
    else:
        made = PackedLinear(packed, child.bias, columns)
    setattr(module.get_submodule(owner), own, made)


def pack_linears(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace, in place, every plain linear layer within `module` whose inputs come in groups by
    one in 4 bits, with products in `dtype`."""
    for name, child in module.named_children():
        if type(child) is not nn.Linear or child.in_features % GROUP:
            pack_linears(child, dtype)
            continue
        packed = PackedWeights(quantized(child.weight.data), ROUNDED_TO, dtype)
        setattr(module, name, PackedLinear(packed, child.bias))


def quantized(weight: Tensor) -> Tensor:
    """Blocks of 4 bits, `(outputs, bytes of one)` uint8, of weights `(outputs, inputs)`."""
    if weight.is_meta:  # for a plan
        size = weight.shape[1] // ROUNDED_TO.inputs * ROUNDED_TO.nbytes
        return torch.empty(len(weight), size, dtype=torch.uint8, device="meta")
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    plain = weight.float().cpu().numpy()
    return torch.from_numpy(quantize(plain, GGMLQuantizationType.Q4_1)).to(weight.device)
