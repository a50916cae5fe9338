"""Attention over ragged KV heads: Triton's interpreter on a CPU, the kernel on a CUDA device."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlite.ops.attention import attend_ragged
from kvlite.ops.softmax import Softmax
from tests.interpreted import DEVICE, kernels

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_ragged") as module:
        yield module


def naive(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, last: Tensor, softcap: float | None
) -> Tensor:
    """One head and one sequence at a time, in float64."""
    out = torch.empty_like(q, dtype=torch.float64)
    for batch in range(q.shape[0]):
        for head, (start, end) in enumerate(zip(starts.tolist(), last.tolist(), strict=True)):
            own = slice(start, end + 1)
            shares = probabilities(q[batch, head], keys[batch, own], softcap)
            out[batch, head] = shares @ values[batch, own].double()
    return out


def probabilities(q: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """What queries `(..., rows, dim)` make of keys `(..., n, dim)`, in float64."""
    logits = q.double() @ keys.double().mT / q.shape[-1] ** 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.softmax(-1)


def check(
    kernel: ModuleType,
    lengths: list[int],
    capacities: list[int],
    rows: int,
    dim: int,
    softcap: float | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    near: float = 1e-4,
) -> None:
    """The kernel and its twin against the oracle; what is not filled is not a number."""
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    q = torch.randn(batch, len(lengths), rows, dim, generator=generator).to(dtype)
    keys, values = (
        torch.randn(batch, sum(capacities), dim, generator=generator).to(dtype) for _ in range(2)
    )
    starts = torch.tensor([sum(capacities[:head]) for head in range(len(capacities))])
    last = starts + torch.tensor(lengths) - 1
    expected = naive(q, keys, values, starts, last, softcap)
    slots = torch.arange(sum(capacities))
    filled = ((slots >= starts[:, None]) & (slots <= last[:, None])).any(0)
    for each in (keys, values):
        each[:, ~filled] = torch.nan
    on_device = [each.to(DEVICE) for each in (q, keys, values, starts, last)]
    shares = torch.zeros(batch, sum(capacities), dtype=torch.float64)
    for head, (start, end) in enumerate(zip(starts.tolist(), last.tolist(), strict=True)):
        own = slice(start, end + 1)
        shares[:, own] = probabilities(q[:, head], keys[:, own], softcap).mean(1)
    for run in (kernel.attend_ragged, attend_ragged):
        weights = torch.full((batch, sum(capacities)), torch.nan, device=DEVICE)
        softmax = Softmax(dim**-0.5, softcap)
        out = run(*on_device, max(capacities), softmax, weights)
        assert out.dtype == dtype
        assert (out.cpu().double() - expected).abs().max() < near
        assert (weights.cpu().double() - shares).abs().max() < near
        assert out.equal(run(*on_device, max(capacities), softmax))
    sinks = torch.randn(len(lengths) * rows, generator=generator).to(DEVICE)
    softmax = Softmax(dim**-0.5, softcap, sinks)
    found = []
    for run in (kernel.attend_ragged, attend_ragged):
        weights = torch.empty(batch, sum(capacities), device=DEVICE)
        found.append((run(*on_device, max(capacities), softmax, weights), weights))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).abs().max() < near


@pytest.mark.parametrize("dim", [16, 64, 96, 128])
def test_heads_hold_what_they_hold(kernel: ModuleType, dim: int) -> None:
    check(kernel, [3, 130, 64, 1], [70, 130, 65, 9], rows=4, dim=dim)


def test_soft_caps_and_sequences(kernel: ModuleType) -> None:
    check(kernel, [33, 200], [64, 256], rows=1, dim=32, softcap=5.0, batch=2)


def test_half_precision(kernel: ModuleType) -> None:
    check(kernel, [90, 33], [100, 64], rows=3, dim=64, dtype=torch.bfloat16, near=0.03)


def test_many_splits_are_one_attention(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "splits_for", lambda heads, count, device: 7)
    check(kernel, [1, 300, 129], [8, 320, 200], rows=5, dim=32)


@settings(max_examples=6)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(0, 70)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from([16, 48]),
)
def test_any_lengths(kernel: ModuleType, held: list[tuple[int, int]], rows: int, dim: int) -> None:
    lengths = [length for length, _ in held]
    check(kernel, lengths, [length + room for length, room in held], rows, dim)
