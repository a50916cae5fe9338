"""Products with packed weights: Triton's interpreter on a CPU, the kernels on a CUDA device."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from kvlite.ops.blocks import FORMATS
from tests.interpreted import DEVICE, kernels
from tests.oracles.packed import blocks, by_gguf

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_linear") as module:
        yield module


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_those_of_the_gguf_package(kernel: ModuleType, kind: str) -> None:
    """Of a matrix whose sizes are no multiples of what a program takes, unpacked in float32 and
    float16, and multiplied by five rows."""
    form, inputs = FORMATS[kind], 512 if FORMATS[kind].inputs == 256 else 288
    packed = blocks(kind, 6, inputs)
    plain = by_gguf(kind, packed)
    for dtype in (torch.float32, torch.float16):
        out = torch.empty(6, inputs, dtype=dtype, device=DEVICE)
        kernel.unpack(packed.to(DEVICE), form, out)
        torch.testing.assert_close(out.cpu(), plain.to(dtype), rtol=2e-7, atol=1e-6)
    for dtype, error in ((torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        rows = torch.randn(5, inputs, dtype=dtype)
        found = kernel.multiply(rows.to(DEVICE), packed.to(DEVICE), form).cpu()
        expected = rows.double() @ plain.double().T
        far = error * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=far)
