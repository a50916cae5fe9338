"""What entries got of many queries' attention: Triton's interpreter on a CPU, the kernel on a CUDA
device."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlite.methods.scores import window_scores
from kvlite.ops import attention
from kvlite.ops.softmax import Softmax
from tests.interpreted import DEVICE, kernels
from tests.test_methods import REDUCTIONS, make_case

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_sums") as module:
        yield module


def naive(q: Tensor, k: Tensor, softcap: float | None, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Probabilities `(batch, heads, L, N)` and log-sum-exp `(batch, heads, L)`, in float64."""
    (heads, length, dim), (kv_heads, entries) = q.shape[1:], k.shape[1:3]
    own = k.double().repeat_interleave(heads // kv_heads, 1)
    logits = q.double() @ own.mT / dim**0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        ahead = torch.ones(length, entries, dtype=torch.bool).triu(entries - length + 1)
        logits = logits.masked_fill(ahead, -torch.inf)
    return logits.softmax(-1), logits.logsumexp(-1)


def check(
    kernel: ModuleType,
    length: int,
    entries: int,
    *,
    group: int = 2,
    kv_heads: int = 2,
    dim: int = 16,
    softcap: float | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Sums and the highest against the oracle. Queries lie as a projection leaves them, keys in a
    buffer with room, which is not a number."""
    generator = torch.Generator().manual_seed(length + entries + dim)
    q = torch.randn(batch, length, kv_heads * group, dim, generator=generator).to(dtype)
    q = q.to(DEVICE).transpose(1, 2)
    room = torch.full((batch, kv_heads, entries + 3, dim), torch.nan, dtype=dtype, device=DEVICE)
    k = room[:, :, :entries]
    k.copy_(torch.randn(k.shape, generator=generator) * 2)
    softmax = Softmax(dim**-0.5, softcap)
    for causal, highest in product((True, False), repeat=2):
        probabilities, lse = naive(q.cpu(), k.cpu(), softcap, causal=causal)
        expected = probabilities.amax(2) if highest else probabilities.sum(2)
        lse = lse.float().to(DEVICE)
        got = kernel.attention_of(q, k, lse, softmax, causal=causal, highest=highest)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dim", [80, 96, 128, 256])
def test_chunks_of_a_prompt(kernel: ModuleType, dim: int) -> None:
    check(kernel, 33, 150, dim=dim, kv_heads=1)


def test_sequences_in_bfloat16(kernel: ModuleType) -> None:
    check(kernel, 70, 140, dim=64, dtype=torch.bfloat16, batch=2, group=3)


def test_many_splits_are_one_walk(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "splits_for", lambda programs, steps, device: 7)
    check(kernel, 100, 150, group=1, softcap=5.0)


@settings(max_examples=5)
@given(
    st.integers(1, 140),
    st.integers(0, 140),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([None, 3.0]),
)
def test_any_shape(
    kernel: ModuleType, length: int, before: int, group: int, softcap: float | None
) -> None:
    check(kernel, length, length + before, group=group, softcap=softcap)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what is on a CPU is not interpreted")
def test_what_is_chosen_by_is_what_it_was(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window's scores, and sums and peaks of a chunk, with and without the kernel."""
    monkeypatch.setattr("kvlite.ops.attention.ELEMENTS_AT_ONCE", 1000)
    case = make_case(kv_heads=3, batch=2, rows=11, split=[(2, 0), (1,)], softcap=3.0, seed=3)
    sinks = torch.tensor([0.5, -1.0, 2.0]).repeat(3)
    window = replace(case.window, softmax=replace(case.window.softmax, sinks=sinks))

    def found() -> list[Tensor]:
        scores = [
            window_scores(head_group, window, *how)
            for head_group in case.layer.head_groups
            for how in REDUCTIONS
        ]
        lse = attention.causal_lse(window.queries, case.keys, window.softmax)
        given = window.queries, case.keys, lse, window.softmax
        return [*scores, attention.attention_sums(*given), attention.attention_peaks(*given)]

    before, launches = found(), []
    window = replace(window, softmax=replace(window.softmax, in_tiles=True))
    walk = kernel.attention_of
    monkeypatch.setattr(kernel, "attention_of", lambda *a, **k: launches.append(1) or walk(*a, **k))
    for ours, theirs in zip(found(), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert len(launches) == len(before)
