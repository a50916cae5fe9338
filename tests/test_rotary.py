"""Positions undone and done again: what the model would have made of the same tokens elsewhere."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvlite.cache.recurrent import StateCarrier
from kvlite.engine.layer_prefill import through
from kvlite.errors import SettingError
from kvlite.model.architectures import ADMITTED
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import Rotation, require_turnable, rotated, turned, unrotated
from tests.conftest import Tiny, make_tiny


class Catch:
    """Runs a layer and keeps the queries and keys it was given."""

    q: Tensor
    k: Tensor

    def __init__(self) -> None:
        self.carrier = StateCarrier({})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        self.q, self.k = q, k
        return q


def caught(model: LoadedModel, layer: int, hidden: Tensor, rotation: Rotation) -> list[Tensor]:
    """Queries and keys of a layer as the model makes them with these cos and sin."""
    catch = Catch()
    with torch.no_grad():
        positions = torch.zeros(hidden.shape[1], dtype=torch.int64)
        through(model.layers[layer], hidden, positions, rotation, catch, answers=False)
    return [catch.q, catch.k]


@pytest.mark.cases(12, 60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("at", "to"), [(0, 0), (3, 0), (3, 17), (400, 90), (700, 900)])
def test_turning_equals_encoding_again(tiny: Tiny, at: int, to: int, dtype: torch.dtype) -> None:
    """In every layer: sliding ones may have frequencies of their own."""
    model, count = tiny.model, 9
    if ADMITTED[model.shape.model_type].unturnable:
        pytest.skip("refused for this architecture")
    # A longrope model chooses its frequencies by the length: here the same for all.
    table = model.rotations(0, 1000)
    generator = torch.Generator().manual_seed(at)
    hidden = model.embed(torch.randint(3, 199, (2, count), generator=generator))
    for layer, (cos, sin) in enumerate(table):
        cos, sin = cos.to(dtype), sin.to(dtype)
        here, there = (
            (cos[:, start : start + count], sin[:, start : start + count]) for start in (at, to)
        )
        still = torch.ones_like(here[0]), torch.zeros_like(here[1])
        plain, first, second = (
            [each.to(dtype) for each in caught(model, layer, hidden, (c.float(), s.float()))]
            for c, s in (still, here, there)
        )
        rounding = 1e-5 if dtype == torch.float32 else 0.02
        for bare, one, other in zip(plain, first, second, strict=True):
            close = rounding * float(bare.abs().max())
            undone = unrotated(one, here)
            assert undone.dtype == torch.float32
            assert (undone - bare.float()).abs().max() < close
            assert (rotated(undone, there) - other.float()).abs().max() < close
            again = turned(one, here, there)
            assert again.dtype == dtype
            assert (again - other).abs().max() < close
            if at != to and model.shape.rotary[layer]:
                assert (one - other).abs().max() > 4 * close


def test_rotations_that_change_with_the_length_are_refused() -> None:
    with pytest.raises(SettingError, match=r"longrope.*set toy:limit=false"):
        require_turnable(make_tiny("phi3-longrope").model, "toy:limit=true")
    for name in ("llama", "gemma3", "llama-rope-dynamic", "smollm3"):
        require_turnable(make_tiny(name).model, "toy:limit=true")


def test_rotations_that_cannot_be_undone_are_refused() -> None:
    model = make_tiny("hunyuan").model
    with pytest.raises(SettingError, match=r"this model .*set toy:limit=false"):
        require_turnable(model, "toy:limit=true")


def test_keys_of_layers_without_positions_are_not_turned() -> None:
    """Every other layer of SmolLM3 has none here: turned elsewhere, its keys are as they were."""
    tables = make_tiny("smollm3").model.rotations(3, 5)
    x = torch.randn(1, 2, 5, 16)
    moved = [torch.equal(rotated(x, table), x) for table in tables]
    assert moved == [False, True, False, True]
