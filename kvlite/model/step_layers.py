"""A model's layers for steps of one token a sequence: taken apart, or as they are.

What a layer consists of is recognized by the name of its class, and believed if it then gives what
the module gives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlite.model.packed_token_layer import PackedTokenLayer
from kvlite.model.token_layer import STRUCTURES, Rotation, Structure, TokenLayer
from kvlite.ops.softmax import Softmax

StepLayer = Callable[..., Tensor]
TINY = 1e-3
# How far apart the results may be, of the largest number: products are rounded.
NEAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def step_layers(
    modules: Sequence[Any], rotations: Sequence[Rotation], kv_heads: int
) -> list[StepLayer]:
    """Layers for one token a sequence: taken apart where that gives what the module gives, else the
    modules. One of each class is compared, with the `rotations` of a position for each layer."""
    given = list(zip(modules, rotations, strict=True))
    # The last of each class, as it happens.
    samples = {type(module).__name__: (module, rotation) for module, rotation in given}
    known = {
        name: STRUCTURES[name]
        for name, sample in samples.items()
        if name in STRUCTURES and _holds(STRUCTURES[name], *sample, kv_heads)
    }
    return [
        _taken_apart(module, known[name], kv_heads)
        if (name := type(module).__name__) in known
        else module
        for module in modules
    ]


@torch.inference_mode()
def _holds(structure: Structure, module: Any, rotation: Rotation, kv_heads: int) -> bool:
    try:
        direct = _taken_apart(module, structure, kv_heads)
    except (AttributeError, KeyError):
        return False
    weight = module.input_layernorm.weight
    # So small that the layer's own part shows beside it.
    hidden = torch.linspace(-TINY, TINY, len(weight), dtype=weight.dtype, device=weight.device)
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


def _taken_apart(module: Any, structure: Structure, kv_heads: int) -> TokenLayer:
    layer = PackedTokenLayer if PackedTokenLayer.takes(module, structure) else TokenLayer
    return layer(module, structure, kv_heads)


class _Recorder:
    """Stands in for attention, and remembers what it was given."""

    def __init__(self) -> None:
        self.given: tuple[Tensor, ...] = ()
        self.softmax: Softmax | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        self.given, self.softmax = (q, k, v), softmax
        return q + v.repeat_interleave(q.shape[1] // v.shape[1], 1)
