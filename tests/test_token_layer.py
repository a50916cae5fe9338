"""Decoder layers taken apart for single tokens give what transformers' modules give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.model.cpu import split_linears
from kvlite.model.load import LoadedModel
from kvlite.model.packing import pack_linears
from kvlite.model.step_layers import step_layers
from kvlite.model.token_layer import KNOWN as CLASSES
from kvlite.model.token_layer import PackedTokenLayer, TokenLayer
from kvlite.ops.softmax import Softmax
from tests.conftest import ARCHITECTURES, make_tiny

KNOWN = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "phi3-partial"),
    *("smollm3", "seed-oss"),
]


class Recorder:
    """Attention that is a sum of what it is given, and remembers that."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        self.given, self.softmax = (q, k, v), softmax
        return q + (k - v).repeat_interleave(q.shape[1] // v.shape[1], 1)


def run(
    layer: Callable[..., Tensor], hidden: Tensor, rotation: Any
) -> tuple[Softmax, list[Tensor]]:
    attention = Recorder()
    with torch.inference_mode():
        out = layer(hidden, position_embeddings=rotation, kvlite=attention)
    return attention.softmax, [out, *attention.given]


def pairs(model: LoadedModel, batch: int) -> list[tuple[Tensor, Tensor]]:
    """What each layer gives, whole and taken apart; positions differ by row."""
    found = list[tuple[Tensor, Tensor]]()
    random = torch.Generator().manual_seed(batch)
    for index, module in enumerate(model.layers):
        direct = model.step_layer(index)
        assert isinstance(direct, TokenLayer)
        hidden = torch.randn(batch, 1, 64, generator=random).to(model.dtype)
        at = [model.rotations(place * 70, 1)[index] for place in range(batch)]
        rotation = tuple(map(torch.cat, zip(*at, strict=True)))
        (softmax, expected), (own, given) = (
            run(each, hidden, rotation) for each in (module, direct)
        )
        assert own == softmax
        found += zip(expected, given, strict=True)
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_a_layer_taken_apart_gives_the_same_bits(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = make_tiny(name, dtype=dtype).model
        split_linears(model.module)
        for batch in (1, 3):
            assert all(one.equal(other) for one, other in pairs(model, batch))


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3-partial", "seed-oss"])
def test_with_packed_weights_the_same_but_for_rounding(name: str) -> None:
    model = make_tiny(name).model
    pack_linears(model.module.model.layers, torch.float32)
    assert isinstance(model.step_layer(0), PackedTokenLayer) == (name != "gemma3")
    for one, other in [*pairs(model, 1), *pairs(model, 3)]:
        assert (one - other).abs().max() <= 2e-6 * one.abs().max()


def test_all_known_structures_are_compared() -> None:
    layers = {type(layer).__name__ for name in KNOWN for layer in make_tiny(name).model.layers}
    assert layers == CLASSES


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - {*KNOWN})[::4])
def test_others_stay_whole(name: str) -> None:
    model = make_tiny(name).model
    if type(model.layers[0]).__name__ not in CLASSES:
        assert model.step_layer(0) is model.layers[0]


def test_a_layer_that_does_more_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name it is known, but what it gives shows."""
    model = make_tiny("llama").model
    given = model.layers.modules, model.rotations(1, 1), model.shape.kv_heads
    assert all(isinstance(layer, TokenLayer) for layer in step_layers(*given))
    with monkeypatch.context() as patch:
        mlp = model.layers[3].mlp
        patch.setattr(mlp, "forward", lambda x, forward=mlp.forward: forward(x) * 2)
        assert step_layers(*given) == model.layers.modules
    del model.layers[3].mlp.up_proj
    assert step_layers(*given) == model.layers.modules
