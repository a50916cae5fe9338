"""A layer's small kernels: Triton's interpreter on a CPU, the kernels on a CUDA device."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvlite.ops import layer_ops
from kvlite.ops.layer_ops import Norm
from tests.interpreted import DEVICE, kernels

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def triton_layer_ops() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_layer_ops") as module:
        yield module


@pytest.fixture(scope="module")
def triton_write() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_write") as module:
        yield module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("from_one", [False, True])
def test_they_are_torchs(triton_layer_ops: ModuleType, dtype: torch.dtype, from_one: bool) -> None:
    """Rows, heads and widths that fill no block; tables that differ by row, of part of a head."""
    random = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).mul(2).to(dtype).to(DEVICE)

    norm = Norm(some(80), 1e-5, from_one)
    heads = Norm(some(20), 1e-2, from_one), Norm(some(20), 1e-2, from_one)
    results = []
    for ops in (layer_ops, triton_layer_ops):
        random.manual_seed(2)
        q, k, _ = some(2, 140).split([80, 40, 20], -1)
        one = q.view(2, 4, 20), k.view(2, 2, 20)
        gate, up = some(2, 1, 2400).chunk(2, -1)
        results.append(
            [
                ops.normed(some(2, 1, 80), norm),
                *ops.added(some(2, 1, 80), some(2, 1, 80), norm),
                *ops.turned(*one, None, some(1, 1, 20), some(1, 1, 20)),
                *ops.turned(*one, heads, some(2, 1, 12), some(2, 1, 12)),
                ops.gated(gate.clone(), up.clone(), "SiLUActivation"),
                ops.gated(gate, up, "GELUTanh"),
            ]
        )
    near = 1e-5 if dtype == torch.float32 else 0.05
    for expected, found in zip(*results, strict=True):
        assert found.dtype == dtype
        print((found - expected).abs().max())
        assert torch.allclose(found.float(), expected.float(), rtol=near, atol=near)


def test_a_token_is_written(triton_write: ModuleType) -> None:
    """Into a slot of each head's run, or into any slots of flat storage."""
    k, v = torch.randn(2, 2, 3, 20).to(DEVICE).unbind()
    position = torch.tensor([77], device=DEVICE)
    for slots in (None, torch.tensor([9, 0, 4], device=DEVICE)):
        held = [torch.zeros(2, 15, 20, device=DEVICE) for _ in range(2)]
        at = torch.zeros(2, 15, dtype=torch.int32, device=DEVICE)
        into = (*held, at)
        if slots is None:
            into = tuple(each.unflatten(1, (3, 5))[:, :, 2] for each in into)
        triton_write.write_token(k, v, position, into, slots)
        rows = [2, 7, 12] if slots is None else slots.tolist()
        for row, own in ((k, held[0]), (v, held[1]), (position.expand(2, 3), at)):
            expected = torch.zeros_like(own)
            expected[:, rows] = row.to(own.dtype)
            assert own.equal(expected)
