"""Experts in the blocks of a GGUF file, against what the gguf package makes of them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from kvlite.memory.meter import TensorMeter
from kvlite.model.experts import PROJECTIONS, experts_of, take_one_by_one
from kvlite.model.packed_experts import BlockExperts
from kvlite.model.packed_linear import FEW_ROWS
from kvlite.offload.weights.buffers import lay_out
from kvlite.offload.weights.experts import ExpertPool, ExpertsInMemory, apart
from kvlite.ops.blocks import FORMATS
from kvlite.planner.meta import MetaMeter
from kvlite.planner.meta_cache import MetaOpCache
from tests.conftest import make_tiny
from tests.oracles.packed import blocks, by_gguf

CPU, EXPERTS = torch.device("cpu"), 4


def made(
    kinds: Sequence[str], outputs: int, inputs: int, *, transposed: bool = False
) -> tuple[BlockExperts, Tensor]:
    """Experts of as many pieces as kinds, and all their matrices."""
    pieces = [blocks(kind, EXPERTS * outputs, inputs).unflatten(0, (EXPERTS, -1)) for kind in kinds]
    plain = [by_gguf(*each) for each in zip(kinds, pieces, strict=True)]
    forms = [FORMATS[kind] for kind in kinds]
    packed = BlockExperts([*zip(pieces, forms, strict=True)], torch.float32, transposed=transposed)
    return packed, torch.cat(plain, 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_and_products(kind: str, transposed: bool) -> None:
    """Each expert's matrix is the gguf package's, to the last bit, and products are its: of few
    rows and of many, in one format or two."""
    for kinds in ([kind], [kind, "Q4_K"], ["Q8_0", kind]):
        packed, plain = made(kinds, 70, 512, transposed=transposed)
        rows = torch.randn(90, 512)
        for expert in (0, EXPERTS - 1):
            matrix = plain[expert]
            assert torch.equal(packed[expert], matrix.t() if transposed else matrix)
            for count in (1, FEW_ROWS, FEW_ROWS + 1, 60):
                found = packed.product(rows[:count], expert, transposed)
                expected = rows[:count].double() @ matrix.double().T
                far = 2e-6 * float(expected.abs().max())
                torch.testing.assert_close(found.double(), expected, rtol=0, atol=far)


def packed_model() -> tuple[nn.Module, nn.Module]:
    """A tiny model in float64 whose experts are those of some blocks, and one that has these."""
    tiny = make_tiny("qwen3-moe")
    reference, module = tiny.reference.double(), tiny.model.module
    kinds = {"gate_up_proj": ["IQ4_NL", "Q5_0"], "down_proj": ["MXFP4"]}
    for theirs, ours in zip(experts_of(reference), experts_of(module), strict=True):
        take_one_by_one(ours)
        for name in filter(kinds.__contains__, PROJECTIONS):
            _, outputs, inputs = getattr(theirs, name).shape
            packed, plain = made(kinds[name], outputs // len(kinds[name]), inputs)
            getattr(theirs, name).data.copy_(plain)
            delattr(ours, name)
            setattr(ours, name, packed)
    return reference, module


def through(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """What each layer's experts make of a few tokens and of many."""
    random = torch.Generator().manual_seed(0)
    found = []
    for experts in experts_of(module):
        for count in (3, 60):
            hidden = torch.randn(count, 64, generator=random, dtype=torch.float64).to(dtype)
            shares = torch.rand(count, 2, generator=random, dtype=torch.float64).to(dtype)
            chosen = torch.rand(count, EXPERTS, generator=random).topk(2).indices
            found.append(experts(hidden, chosen, shares).double())
    return found


@torch.inference_mode()
def test_tokens_go_through_them() -> None:
    reference, module = packed_model()
    reference.config._experts_implementation = "eager"
    for found, expected in zip(
        through(module, torch.float32), through(reference, torch.float64), strict=True
    ):
        far = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=far)


@torch.inference_mode()
def test_they_come_in_turn() -> None:
    """From memory, into fewer places than all layers have experts."""
    _, module = packed_model()
    expected = through(module, torch.float32)
    layers = [apart(each, lay_out(each, CPU), 2)[1][0] for each in module.model.layers]
    assert sum(layer.expert_bytes for layer in layers) * EXPERTS == sum(
        each.nbytes for each in module.parameters() if each.dtype == torch.uint8
    )
    pool = ExpertPool(layers, ExpertsInMemory(layers), CPU, 2 * EXPERTS)
    for found, before in zip(through(module, torch.float32), expected, strict=True):
        assert torch.equal(found, before)
    assert pool.brought >= len(layers) * EXPERTS * layers[0].expert_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_has_their_sizes(dtype: torch.dtype) -> None:
    """On the meta device: those of matrices and products, and the memory these take there."""
    with torch.device("meta"):
        empty = [
            (torch.empty(EXPERTS, 96, 512 // form.inputs * form.nbytes, dtype=torch.uint8), form)
            for form in (FORMATS["Q4_K"], FORMATS["Q8_0"])
        ]
    planned = BlockExperts(empty, dtype)
    assert (planned[0].shape, planned[0].dtype) == ((192, 512), dtype)
    for count in (1, 300):
        rows = torch.empty(count, 512, dtype=dtype, device="meta")
        assert planned.product(rows, 0, False).shape == (count, 192)
    if dtype == torch.float32:
        real, _ = made(["Q4_K", "Q8_0"], 96, 512)
        for count in (1, 50):
            with MetaMeter(op_cache=MetaOpCache()) as expected:
                planned.product(torch.empty(count, 512, device="meta"), 0, False)
            with TensorMeter() as taken:
                real.product(torch.zeros(count, 512), 0, False)
            assert expected.peak == taken.peak > 0
