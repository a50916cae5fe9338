"""A model's layers for steps of one token a sequence: taken apart, or as they are.

What a layer consists of is recognized by the name of its class, and believed if it then gives what
the module gives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlite.model.token_layer import KNOWN, PackedTokenLayer, Rotation, TokenLayer
from kvlite.ops.softmax import Softmax

StepLayer = Callable[..., Tensor]
# Sizes of what layers are compared with: a usual one, and one so small that the layer's own part
# shows beside it.
SIZES = (1.0, 1e-3)
# How far apart the results may be, of the largest number: products are rounded.
NEAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def step_layers(
    modules: Sequence[Any], rotations: Sequence[Rotation], kv_heads: int
) -> list[StepLayer]:
    """Layers for one token a sequence: taken apart where that gives what the module gives, else the
    modules. The first and the last of each class are compared, with the `rotations` of a position
    for each layer."""
    by_class: dict[str, list[tuple[Any, Rotation]]] = {}
    for module, rotation in zip(modules, rotations, strict=True):
        by_class.setdefault(type(module).__name__, []).append((module, rotation))
    taken = {
        name
        for name, own in by_class.items()
        if name in KNOWN and all(_holds(*sample, kv_heads) for sample in (own[0], own[-1]))
    }
    return [
        _taken_apart(module, kv_heads) if type(module).__name__ in taken else module
        for module in modules
    ]


@torch.inference_mode()
def _holds(module: Any, rotation: Rotation, kv_heads: int) -> bool:
    try:
        direct = _taken_apart(module, kv_heads)
    except (AttributeError, KeyError):
        return False
    weight = module.input_layernorm.weight
    like = {"dtype": weight.dtype, "device": weight.device}
    return all(
        _alike(module, direct, torch.linspace(-size, size, len(weight), **like), rotation)
        for size in SIZES
    )


def _alike(module: Any, direct: TokenLayer, hidden: Tensor, rotation: Rotation) -> bool:
    one, other = _Recorder(), _Recorder()
    expected = module(hidden[None, None], position_embeddings=rotation, kvlite=one)
    found = direct(hidden[None, None], position_embeddings=rotation, kvlite=other)
    pairs = zip((expected, *one.given), (found, *other.given), strict=True)
    return one.softmax == other.softmax and all(_near(*pair) for pair in pairs)


def _near(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if expected.is_meta:
        return True
    far = (expected.float() - found.float()).abs().max()
    return bool(far <= NEAR[expected.dtype] * expected.float().abs().max())


def _taken_apart(module: Any, kv_heads: int) -> TokenLayer:
    layer = PackedTokenLayer if PackedTokenLayer.takes(module) else TokenLayer
    return layer(module, kv_heads)


class _Recorder:
    def __init__(self) -> None:
        self.given: tuple[Tensor, ...] = ()
        self.softmax: Softmax | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        self.given, self.softmax = (q, k, v), softmax
        return q + v.repeat_interleave(q.shape[1] // v.shape[1], 1)
