"""What entries got of many queries' attention: Triton's interpreter on a CPU, the kernel on a CUDA
device."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlite.ops.softmax import Softmax
from tests.interpreted import DEVICE, kernels

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_sums") as module:
        yield module


def naive(q: Tensor, k: Tensor, softcap: float | None, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Probabilities `(batch, kv heads, group, L, N)` of all queries, and their log-sum-exp
    `(batch, heads, L)`, in float64."""
    (batch, heads, length, dim), (kv_heads, entries) = q.shape, k.shape[1:3]
    own = k.double().repeat_interleave(heads // kv_heads, 1)
    logits = q.double() @ own.mT / dim**0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        ahead = torch.ones(length, entries, dtype=torch.bool).triu(entries - length + 1)
        logits = logits.masked_fill(ahead, -torch.inf)
    return logits.softmax(-1).view(batch, kv_heads, -1, length, entries), logits.logsumexp(-1)


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
    """Sums and peaks against the oracle. Queries lie as a projection leaves them, keys in a buffer
    with room, which is not a number."""
    generator = torch.Generator().manual_seed(length + entries + dim)
    q = torch.randn(batch, length, kv_heads * group, dim, generator=generator).to(dtype)
    q = q.to(DEVICE).transpose(1, 2)
    room = torch.full((batch, kv_heads, entries + 3, dim), torch.nan, dtype=dtype, device=DEVICE)
    k = room[:, :, :entries]
    k.copy_(torch.randn(k.shape, generator=generator) * 2)
    softmax = Softmax(dim**-0.5, softcap)
    near = {"rtol": 1e-3, "atol": 1e-5}
    each, lse = naive(q.cpu(), k.cpu(), softcap, causal=True)
    sums = kernel.attention_sums(q, k, lse.float().to(DEVICE), softmax)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double().cpu(), each.mean(2).sum(2), **near)
    each, lse = naive(q.cpu(), k.cpu(), softcap, causal=False)
    peaks = kernel.attention_peaks(q, k, lse.float().to(DEVICE), softmax)
    assert peaks.dtype == torch.float32
    torch.testing.assert_close(peaks.double().cpu(), each.amax((2, 3)), **near)


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
