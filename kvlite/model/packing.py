"""Weights that stay packed as a GGUF file has them, or are packed in 4 bits while they are read."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
        keep_packed(
            module,
            weights,
            lambda name, sizes: [
                torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes
            ],
        )


def keep_packed(
    module: Any,
    weights: "Weights",
    blocks: Callable[[str, Sequence[tuple[int, ...]]], Sequence[Tensor]],
    columns: Callable[[str], Tensor | None] = lambda name: None,
    prefix: str = "",
) -> None:
    """Replace, in place, every linear layer, embedding and stack of experts of a model that its
    file has in blocks.

    Args:
        blocks: gives them, of a parameter's name and sizes `(outputs, bytes of one)`, of experts
            `(experts, outputs, bytes of one)`; several where a file has parts in several formats.
        columns: gives the order of a linear layer's inputs, if it has one.
        prefix: what the names of a part of a model begin with.
    """
    assert weights.index is not None
    for name, child in [*module.named_modules()]:
        tensor = weights.index.tensors.get(f"{prefix}{name}.weight")
        if tensor is None or not tensor.forms or not isinstance(child, nn.Linear | nn.Embedding):
            continue
        (form,) = tensor.forms
        outputs, inputs = tensor.shape
        size = outputs, inputs // form.inputs * form.nbytes
        (found,) = blocks(f"{prefix}{name}.weight", [size])
        packed = PackedWeights(found, form, weights.dtype)
        _replace(module, name, child, packed, columns(f"{prefix}{name}.weight"))
        if name in _EMBEDDINGS and module.config.tie_word_embeddings:
            module.lm_head = PackedLinear(packed)


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
    one in 4 bits.

    Args:
        dtype: of products.
    """
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
