"""What a CPU multiplies in bfloat16 while it reads: against the same products in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import kvlite
from kvlite.engine.prefill import prefill
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.packed_linear import PackedWeights
from kvlite.ops.attention import attend, attend_causal
from kvlite.ops.blocks import FORMATS
from kvlite.ops.device import MANY_ROWS, has_bfloat16, has_compiled
from kvlite.ops.softmax import Softmax
from tests.oracles.packed import blocks, by_gguf

CAPABLE = torch.cpu.get_capabilities().get("avx512_bf16", False)
pytestmark = pytest.mark.skipif(
    not (CAPABLE and has_compiled(torch.device("cpu"))), reason="no loops in bfloat16 run here"
)


@pytest.fixture(autouse=True)
def wherever_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on processors where float32 is faster."""
    monkeypatch.setattr("kvlite.model.packed_linear.has_bfloat16", lambda: True)


@pytest.mark.parametrize(
    ("processor", "chosen"), [("znver4", True), ("znver5", True), ("emeraldrapids", False)]
)
def test_it_is_chosen_where_it_is_faster(
    processor: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: processor)
    assert has_bfloat16.__wrapped__() == chosen


def halves(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().double()


def test_numbers_are_rounded_as_torch_does() -> None:
    from kvlite.ops.numba_tiles import to_bfloat16

    bits = torch.randint(-(2**31), 2**31 - 1, (2000,)).to(torch.int32)
    ties = torch.arange(-8, 8, dtype=torch.int32) * 0x8000 + 0x3F800000
    numbers = torch.cat([bits, ties]).view(torch.float32)
    numbers = numbers[~numbers.isnan()]
    found = np.array([to_bfloat16(each) for each in numbers.numpy()], np.uint16)
    assert np.array_equal(found, numbers.bfloat16().view(torch.uint16).numpy())


@pytest.mark.parametrize("kind", FORMATS)
def test_products_with_packed_weights(kind: str) -> None:
    """Of rows and outputs that fill no tile, too; the rest of the weights is not looked at."""
    for outputs, count in ((64, MANY_ROWS), (100, MANY_ROWS + 3), (192, 150)):
        packed, rows = blocks(kind, outputs, 512), torch.randn(count, 512)
        weights = PackedWeights(packed, FORMATS[kind], torch.float32)
        plain = by_gguf(kind, packed)
        found, expected = weights.matrix.product(rows), halves(rows) @ halves(plain).T
        torch.testing.assert_close(
            found.double(), expected, rtol=0, atol=2e-5 * float(expected.abs().max())
        )
        few = weights.matrix.product(rows[: MANY_ROWS - 1])
        exact = rows[: MANY_ROWS - 1].double() @ plain.double().T
        torch.testing.assert_close(
            few.double(), exact, rtol=0, atol=2e-6 * float(exact.abs().max())
        )


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("dim", [64, 96, 40, 128])
def test_attention(heads: tuple[int, int], dim: int) -> None:
    """Of all entries, or causally of the last ones: of views, rows that fill no tile, entries of
    several blocks."""
    group, softmax = heads[0] // heads[1], Softmax(dim**-0.5, in_bfloat16=True)
    for rows, entries, causal in ((70, 70, True), (300, 650, True), (64, 700, False)):
        q = 2 * torch.randn(2, rows, heads[0], dim).transpose(1, 2)
        k, v = torch.randn(2, 2, heads[1], entries + 9, dim)[:, :, :, :entries]
        found = (
            attend_causal(q, k, v, softmax) if causal else attend(q, k, v, softmax, causal=False)
        )
        logits = halves(q * softmax.scale) @ halves(k.repeat_interleave(group, 1)).mT
        if causal:
            later = torch.ones(rows, entries).triu(entries - rows + 1).bool()
            logits.masked_fill_(later, -torch.inf)
        expected = logits.softmax(-1) @ halves(v.repeat_interleave(group, 1))
        torch.testing.assert_close(found[1].double(), logits.logsumexp(-1), rtol=0, atol=1e-4)
        # Shares are rounded, too: by 2^-9 of them at the most.
        torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=2**-7)


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, rows = blocks("Q4_1", 200, 256), torch.randn(100, 256)
    weights = PackedWeights(packed, FORMATS["Q4_1"], torch.float32)
    q, k, v = torch.randn(3, 1, 4, 400, 64)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        out, lse = attend(q, k, v, Softmax(0.1, in_bfloat16=True), causal=True)
        found.append((weights.matrix.product(rows), out, lse))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_reading_rounds_and_answering_does_not(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With packed weights; a short message is like an answer, and float32 stays as it is."""

    def logits(weights: str, count: int) -> Tensor:
        model = kvlite.load(str(tiny_folder), weights=weights).model
        policies = layer_policies(parse_method("full"), model.shape, count, count)
        ids = torch.arange(3, 3 + count)[None]
        return prefill(model, model.empty_cache(), ids, policies).log_softmax(-1)

    cases = [(weights, count) for weights in ("int4", "fp32") for count in (MANY_ROWS - 1, 200)]
    rounding = [logits(*case) for case in cases]
    for module in ("kvlite.model.attention_interface", "kvlite.model.packed_linear"):
        monkeypatch.setattr(f"{module}.MANY_ROWS", 1 << 30)
    exact = [logits(*case) for case in cases]
    same = [torch.equal(one, other) for one, other in zip(rounding, exact, strict=True)]
    assert same == [case != ("int4", 200) for case in cases]
    divergence = (exact[1].exp() * (exact[1] - rounding[1])).sum()
    assert divergence < 1e-2
