"""Experts whose weights are read in place: Triton's interpreter on a CPU, the kernels on a CUDA
device."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvlite.model.experts import experts_of, take_few_in_place
from kvlite.model.packed_experts import BlockExperts
from kvlite.model.quantizing import NF4Experts
from kvlite.ops.blocks import FORMATS
from tests.conftest import make_tiny
from tests.interpreted import DEVICE, kernels
from tests.oracles.packed import blocks, by_gguf

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_experts") as module:
        yield module


NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SIZES = [(5, 70, 40), (3, 6, 600)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
def test_each_pair_is_a_product(kernel: ModuleType, dtype: torch.dtype, transposed: bool) -> None:
    """Of a row with each of the experts it chose, of which two chose the same; sizes are no
    multiples of what a program takes."""
    random = torch.Generator().manual_seed(0)
    for experts, outputs, inputs in SIZES:
        chosen = torch.randint(experts, (6,), generator=random)
        chosen[4] = chosen[1]
        size = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
        weights = torch.randn(size, generator=random).to(dtype)
        weights = weights.mT if transposed else weights
        bias = torch.randn(experts, outputs, generator=random).to(dtype) if transposed else None
        for each in (2, 1):
            rows = torch.randn(6 // each, inputs, generator=random).to(dtype)
            own = rows.double().repeat_interleave(each, 0)
            expected = (weights[chosen].double() @ own[..., None])[..., 0]
            if bias is not None:
                expected += bias[chosen].double()
            given = [each.to(DEVICE) for each in (rows, chosen, weights)]
            found = kernel.multiply(*given, None if bias is None else bias.to(DEVICE))
            assert found.dtype == dtype
            near(found, expected, NEAR[dtype])


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", NEAR)
def test_mxfp4_is_unpacked_as_transformers_does_it(kernel: ModuleType, dtype: torch.dtype) -> None:
    """Every byte, in the place of every number of a group."""
    random = torch.Generator().manual_seed(0)
    for experts, outputs, groups in ((4, 18, 3), (2, 5, 17)):
        sizes = experts, outputs, groups
        blocks = torch.randint(256, (*sizes, 16), generator=random).byte()
        scales = torch.randint(100, 130, sizes, generator=random).byte()
        chosen = torch.randint(experts, (4,), generator=random)
        chosen[2] = chosen[0]
        bias = torch.randn(experts, outputs, generator=random).to(dtype)
        unpacked = convert_moe_packed_tensors(blocks, scales, dtype=torch.float64)
        for each in (2, 1):
            rows = torch.randn(4 // each, groups * 32, generator=random).to(dtype)
            own = rows.double().repeat_interleave(each, 0)
            expected = (own[:, None] @ unpacked[chosen])[:, 0] + bias[chosen]
            given = [each.to(DEVICE) for each in (rows, chosen, blocks, scales, bias)]
            found = kernel.multiply_mxfp4(*given)
            assert found.dtype == dtype
            near(found, expected, NEAR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_unpacked_as_bitsandbytes_does_it(kernel: ModuleType, dtype: torch.dtype) -> None:
    """More blocks than share a scale of their scales, and no multiple of them."""
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 27, 640, generator=random) * torch.rand(3, 27, 1, generator=random)
    experts = NF4Experts(whole.to(DEVICE), torch.float32)
    assert experts.in_place(False) and not experts.in_place(True)
    unpacked = torch.stack([experts[expert].cpu().double() for expert in range(3)])
    chosen = torch.tensor([2, 0, 2, 1])
    for each in (2, 1):
        rows = torch.randn(4 // each, 640, generator=random).to(dtype)
        own = rows.double().repeat_interleave(each, 0)
        found = experts.products(rows.to(DEVICE), chosen.to(DEVICE), None)
        assert found.dtype == dtype
        near(found, (unpacked[chosen] @ own[..., None])[..., 0], NEAR[dtype])


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_unpacked_as_the_gguf_package_does_it(kernel: ModuleType, kind: str) -> None:
    """In two pieces, the first in 8 bits; of the experts that rows chose, or of one."""
    inputs, sizes = 512 if FORMATS[kind].inputs == 256 else 288, ((6, "Q8_0"), (5, kind))
    packed = [blocks(name, 3 * outputs, inputs).view(3, outputs, -1) for outputs, name in sizes]
    plain = [by_gguf(name, each) for each, (_, name) in zip(packed, sizes, strict=True)]
    chosen, random = torch.tensor([2, 0, 2, 1]), torch.Generator().manual_seed(0)
    bias = torch.randn(3, 11, generator=random)
    given = [
        (each.to(DEVICE), FORMATS[name]) for each, (_, name) in zip(packed, sizes, strict=True)
    ]
    experts = BlockExperts(given, torch.float32, on_cpu=False)
    assert experts.in_place(False) and not experts.in_place(True)
    for dtype in (torch.float32, torch.bfloat16):
        for each in (2, 1):
            rows = torch.randn(4 // each, inputs, generator=random).to(dtype)
            own = rows.double().repeat_interleave(each, 0)
            expected = (torch.cat(plain, 1)[chosen].double() @ own[..., None])[..., 0]
            added = bias.to(DEVICE, dtype)
            found = experts.products(rows.to(DEVICE), chosen.to(DEVICE), added)
            assert found.dtype == dtype
            near(found, expected + added.cpu().double()[chosen], NEAR[dtype])
        found = experts.product(rows.to(DEVICE), 2, False)
        matrix = torch.cat([each[2] for each in plain])
        near(found, rows.double() @ matrix.double().T, NEAR[dtype])


def near(found: torch.Tensor, expected: torch.Tensor, far: float = 1e-5) -> None:
    assert (found.cpu().double() - expected).abs().max() <= far * float(expected.abs().max())


NAMES = ["mixtral", "qwen3-moe", "gpt-oss", "gemma4-moe", "deepseek-v3", "nemotron-h"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_few_tokens_are_those_of_transformers(
    kernel: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its modules of experts in float64, where two tokens chose the same; more tokens than that
    go through all experts together."""
    monkeypatch.setattr("kvlite.model.experts.has_triton", lambda device: True)
    calls = list[int]()
    multiply = kernel.multiply

    def counted(rows: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        product: torch.Tensor = multiply(rows, *given)
        return product

    monkeypatch.setattr(kernel, "multiply", counted)
    tiny = make_tiny(name, str(DEVICE))
    take_few_in_place(tiny.model.module)
    reference, ours = tiny.reference.double(), tiny.model.module
    reference.config._experts_implementation = "eager"
    random = torch.Generator().manual_seed(0)
    own, theirs = (next(experts_of(each)) for each in (ours, reference))
    for parameter in theirs.parameters():  # biases are zeros
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=random).to(DEVICE)
    own.load_state_dict(theirs.state_dict())
    for chosen in ([[3, 1]], [[0, 2], [2, 3]], [[1, 2], [0, 1], [3, 0]]):
        hidden = torch.randn(len(chosen), 64, generator=random).to(DEVICE)
        shares = torch.rand(len(chosen), 2, generator=random).to(DEVICE)
        given = torch.tensor(chosen, device=DEVICE)
        near(own(hidden, given, shares), theirs(hidden.double(), given, shares.double()).cpu())
    assert calls == [1, 2, 2, 4]
