"""Weights packed in 4 and 8 bits for a CPU, and whether a model's files have no more than that.

Blocks of a GGUF file are codes, with a scale and an offset for every 32 weights (Q4_0, Q4_1, Q4_K)
or a scale (Q8_0). Once they are written as float32 they still lie on a grid, from which their codes
are recovered.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from kvlite.model.files import Stored, stored_weights
from kvlite.model.packed_linear import GROUP, PackedEmbedding, PackedLinear, PackedWeights

if TYPE_CHECKING:
    from kvlite.model.weights import Weights

TINY = 1e-30
# How far a weight may lie from its grid, of the largest in its group: float32 rounded it.
ROUNDED = 2**-21
Codes = tuple[Tensor, Tensor, Tensor]


def stored_packed(folder: Path, config: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the matrices of a model's layers are stored on grids of 4 bits, all of them, and its
    embedding, which must be its head too, of 8 bits: two rows of each are looked at.

    Args:
        config: its config.json.
    """
    try:
        stored = stored_weights(folder)
        linears = [
            _sample(part)
            for name, part in stored.items()
            if name.startswith("model.layers.") and _has_groups(part)
        ]
        lossless = bool(linears) and quantize(torch.cat(linears), on_grid=True)[1]
        embedding = stored.get("model.embed_tokens.weight")
        tied = config.get("tie_word_embeddings") is True and "lm_head.weight" not in stored
        plain = not str(config.get("model_type")).startswith("gemma")  # whose embeddings are scaled
        if not (lossless and tied and plain and embedding is not None and _has_groups(embedding)):
            return lossless, False
        return True, quantize_8bit(_sample(embedding))[1]
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return False, False  # there are none yet, or loading them will say what is wrong


def _has_groups(part: Stored) -> bool:
    return len(part.shape) == 2 and not part.shape[1] % GROUP


def _sample(part: Stored) -> Tensor:
    """Groups of two rows, `(n, 32)`. Raises ValueError if it is not float32."""
    if part.kind != "F32":
        raise ValueError(f"{part.path} has weights of type {part.kind}")
    rows, inputs = part.shape
    lines = [
        np.fromfile(part.path, np.float32, inputs, offset=part.begin + 4 * inputs * row)
        for row in (rows // 3, 2 * rows // 3)
    ]
    return torch.from_numpy(np.concatenate(lines)).view(-1, GROUP)


def quantize(weight: Tensor, *, on_grid: bool) -> tuple[Codes, bool]:
    """Weights in 4 bits, between the least and the largest of each group.

    Args:
        weight: `(outputs, inputs)`.
        on_grid: look for the steps they lie on, which may be fewer than 15 in a group.

    Returns:
        Codes `(outputs, inputs)` uint8; scales and offsets `(outputs, inputs / 32)` float32; and
        whether the weights are recovered: looked for, and found in all groups.
    """
    groups = _groups(weight)
    low, high = groups.aminmax(dim=2)
    steps, exact = _steps(groups, low, high) if on_grid else (15, False)
    scale = (high - low) / steps
    codes = groups.sub(low[..., None]).div_(scale[..., None].clamp(min=TINY)).round_()
    return (codes.clamp_(0, 15).to(torch.uint8).flatten(1), scale, low), exact


def quantize_8bit(weight: Tensor) -> tuple[Codes, bool]:
    """Like `quantize`, in 8 bits: 127 steps from 0 to the largest weight of each group."""
    groups = _groups(weight)
    most = groups.abs().amax(2)
    scale = most / 127
    codes = groups.div(scale[..., None].clamp(min=TINY)).round_()
    far = codes.mul(scale[..., None]).sub_(groups).abs_().amax(2)
    exact = not far.is_meta and bool((far <= ROUNDED * most).all())
    return (codes.add_(128).to(torch.uint8).flatten(1), scale, -128 * scale), exact


def _steps(groups: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, bool]:
    """How many steps lie between a group's least and largest weight, if all of it lies on a grid of
    at most 16 points, else 15; and whether all groups do."""
    groups, low, span = groups.flatten(0, 1), low.flatten(), (high - low).flatten()
    allowed = ROUNDED * torch.maximum(low.abs(), (low + span).abs())
    found = torch.full_like(span, 15)
    left = torch.arange(len(groups))
    for steps in range(15, 0, -1):
        step = span[left, None] / steps
        above = groups[left] - low[left, None]
        nearest = above.div(step.clamp(min=TINY)).round_().mul_(step)
        fit = nearest.sub_(above).abs_().amax(1) <= allowed[left]
        found[left[fit]] = steps
        left = left[~fit]
        if not len(left):
            break
    return found.view_as(high), not len(left)


def _groups(weight: Tensor) -> Tensor:
    return weight.float().view(len(weight), -1, GROUP)


def pack(module: Any, weights: "Weights") -> None:
    """Pack what a transformers model's layers and its embedding are to have packed."""
    pack_linears(module.model.layers, lossless=weights.lossless)
    if weights.packed_embedding:
        pack_embedding(module)


def pack_linears(module: nn.Module, *, lossless: bool) -> None:
    """Replace, in place, every plain linear layer within `module` whose inputs come in groups.

    Args:
        lossless: leave those as they are that would not be recovered.
    """
    for name, child in module.named_children():
        if type(child) is not nn.Linear or child.in_features % GROUP:
            pack_linears(child, lossless=lossless)
            continue
        meta = child.weight.is_meta  # for a plan
        parts, exact = quantize(child.weight.data, on_grid=lossless and not meta)
        if exact or meta or not lossless:
            setattr(module, name, PackedLinear(PackedWeights(*parts, 4), child.bias))


def pack_embedding(module: Any) -> None:
    """Pack an embedding that is the head too, if it is recovered."""
    weight = module.model.embed_tokens.weight.data
    parts, exact = quantize_8bit(weight)
    if exact or weight.is_meta:
        packed = PackedWeights(*parts, 8)
        module.model.embed_tokens, module.lm_head = PackedEmbedding(packed), PackedLinear(packed)
