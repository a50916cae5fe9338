"""Attention in blocks, merged and masked, against the loops in `oracles/attention.py`."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlite.ops import attention
from kvlite.ops.attention import attend, attend_masked, attend_with_rows, merged
from kvlite.ops.softmax import Softmax

from .oracles.attention import FloatArray, attention_rows, kv_head_of, masked_attention

Tensors = tuple[Tensor, Tensor, Tensor]

HEADS = [
    pytest.param((2, 2), id="mha"),
    pytest.param((6, 2), id="gqa3"),
    pytest.param((4, 1), id="mqa4"),
]
DIMS = [16, 64, 128]
SOFTCAPS = [None, 0.8, 30.0]


def make_tensors(
    heads: tuple[int, int], rows: int, n: int, dim: int, batch: int = 2, seed: int = 0
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads[0], rows, dim, generator=generator)
    k, v = torch.randn(2, batch, heads[1], n, dim, generator=generator)
    return q, k, v


def oracle_output(
    tensors: Tensors, visible_until: list[int], scale: float, softcap: float | None
) -> FloatArray:
    """The oracle's output where row i sees the slots up to `visible_until[i]`."""
    q, k, v = (tensor.double().numpy() for tensor in tensors)
    kv_heads, n = k.shape[1:3]
    slots = np.array([range(n)] * kv_heads)
    everything = [range(n)] * kv_heads
    return np.stack(
        [
            masked_attention(q[b], k[b], v[b], visible_until, slots, scale, everything, softcap)
            for b in range(len(q))
        ]
    )


def oracle_lse(
    tensors: Tensors, visible_until: list[int], scale: float, softcap: float | None
) -> FloatArray:
    """Logarithm of the sum of exponentials of every row's logits, written out."""
    q, k, _ = (tensor.double().numpy() for tensor in tensors)
    batch, heads, rows, _ = q.shape
    lse = np.zeros((batch, heads, rows))
    for b, h, i in np.ndindex(batch, heads, rows):
        own = k[b, kv_head_of(h, heads, k.shape[1])][: visible_until[i] + 1]
        logits = own @ q[b, h, i] * scale
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        lse[b, h, i] = np.log(np.exp(logits).sum())
    return lse


def close(ours: Tensor, expected: FloatArray | Tensor, atol: float = 2e-5) -> bool:
    assert ours.shape == expected.shape
    return np.allclose(ours.double().numpy(), np.asarray(expected), rtol=1e-5, atol=atol)


# --- attend --------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("rows", "n", "causal"), [(13, 13, True), (5, 19, False), (1, 17, False)])
def test_attend_equals_the_oracle(
    heads: tuple[int, int], dim: int, softcap: float | None, rows: int, n: int, causal: bool
) -> None:
    tensors = make_tensors(heads, rows, n, dim)
    scale = dim**-0.5
    visible = list(range(n)) if causal else [n - 1] * rows
    out, lse = attend(*tensors, Softmax(scale, softcap), causal=causal)
    assert lse.dtype == torch.float32
    assert close(out, oracle_output(tensors, visible, scale, softcap))
    assert close(lse, oracle_lse(tensors, visible, scale, softcap))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize(("rows", "n", "causal"), [(13, 13, True), (6, 19, False), (1, 17, False)])
def test_plain_attention_equals_the_oracle_in_any_blocks(
    heads: tuple[int, int],
    block: int,
    rows: int,
    n: int,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fallback for any device, with and without a soft cap."""
    monkeypatch.setattr(attention, "ROW_BLOCK", block)
    tensors = make_tensors(heads, rows, n, 16, seed=1)
    visible = list(range(n)) if causal else [n - 1] * rows
    for softcap in (None, 2.0):
        out, lse = attention._plain(*tensors, Softmax(0.3, softcap), causal)
        assert close(out, oracle_output(tensors, visible, 0.3, softcap))
        assert close(lse, oracle_lse(tensors, visible, 0.3, softcap))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attend_in_half_precision(dtype: torch.dtype, softcap: float | None) -> None:
    tensors = make_tensors((6, 2), 9, 9, 64)
    halves = tuple(tensor.to(dtype) for tensor in tensors)
    out, lse = attend(*halves, Softmax(0.125, softcap), causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    visible = list(range(9))
    assert close(out, oracle_output(halves, visible, 0.125, softcap), atol=0.03)  # type: ignore[arg-type]
    assert close(lse, oracle_lse(halves, visible, 0.125, softcap), atol=0.03)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_half_precision(dtype: torch.dtype) -> None:
    """Products that float16 cannot hold, and differences that bfloat16 would round away."""
    q, k, v = (tensor.to(dtype) for tensor in make_tensors((6, 2), 1, 64, 128))
    out, rows = attend_with_rows(q * 30, k * 30, v, Softmax(1e-3, None))
    exact = attend_with_rows(q.double() * 30, k.double() * 30, v.double(), Softmax(1e-3, None))
    assert out.dtype == dtype and rows.dtype == torch.float32
    assert close(out, exact[0], atol=0.04)
    assert close(rows, exact[1], atol=0.01)


# --- merge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("rows", "earlier"), [(9, 14), (9, 1), (1, 30)])
def test_merging_two_parts_equals_one(
    heads: tuple[int, int], softcap: float | None, rows: int, earlier: int
) -> None:
    """What was read before, seen by all, and the new chunk, seen causally."""
    q, k, v = make_tensors(heads, rows, earlier + rows, 16, seed=2)
    old = attend(q, k[:, :, :earlier], v[:, :, :earlier], Softmax(0.3, softcap), causal=False)
    new = attend(q, k[:, :, earlier:], v[:, :, earlier:], Softmax(0.3, softcap), causal=True)
    visible = list(range(earlier, earlier + rows))
    expected = oracle_output((q, k, v), visible, 0.3, softcap)
    assert close(merged(old, new)[0], expected)
    assert close(merged(new, old)[0], expected)


def test_merging_parts_of_very_different_weight() -> None:
    """One part outweighs the other by e^300, which no float holds."""
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 1, 2, 4, 8, generator=generator)
    low, high = torch.full((2, 1, 2, 4), -150.0)
    high = high + 300
    assert torch.equal(merged((a, low), (b, high))[0], b)
    assert torch.equal(merged((a, high), (b, low))[0], a)
    assert close(merged((a, low), (b, low))[0], (a + b) / 2)


# --- masks and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [1, 3, 8, 40])
def test_a_sliding_band_equals_the_oracle_row_by_row(
    heads: tuple[int, int], window: int, softcap: float | None
) -> None:
    before, rows, dim = 9, 7, 16
    n = before + rows
    q, k, v = make_tensors(heads, rows, n, dim, seed=4)
    i = torch.arange(before, n)[:, None]
    j = torch.arange(n)
    out = attend_masked(q, k, v, (j <= i) & (j > i - window), Softmax(0.3, softcap))
    slots = np.array([range(n)] * heads[1])
    for b, row in np.ndindex(2, rows):
        position = before + row
        band = range(max(0, position - window + 1), position + 1)
        expected = masked_attention(
            q[b, :, row : row + 1].double().numpy(),
            k[b].double().numpy(),
            v[b].double().numpy(),
            [position],
            slots,
            0.3,
            [band] * heads[1],
            softcap,
        )
        assert close(out[b, :, row : row + 1], expected)


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_say_where_decode_looked(
    heads: tuple[int, int], dim: int, softcap: float | None, rows: int
) -> None:
    n, scale = 18, dim**-0.5
    q, k, v = make_tensors(heads, rows, n, dim, seed=5)
    out, looked = attend_with_rows(q, k, v, Softmax(scale, softcap))
    assert looked.dtype == torch.float32
    assert close(out, oracle_output((q, k, v), [n] * rows, scale, softcap))
    slots = np.array([range(n)] * heads[1])
    for b in range(2):
        weights = attention_rows(
            q[b].double().numpy(), k[b].double().numpy(), [n] * rows, slots, scale, softcap
        )
        for kv_head in range(heads[1]):
            group = [h for h in range(heads[0]) if kv_head_of(h, *heads) == kv_head]
            assert close(looked[b, kv_head], weights[group].mean(0), atol=1e-6)
    assert close(looked.sum(-1), torch.ones(2, heads[1], rows))


def test_inputs_are_left_as_they_are() -> None:
    """Logits are worked on in place; the queries, keys and values must not be."""
    tensors = make_tensors((4, 4), 6, 6, 16)
    copies = [tensor.clone() for tensor in tensors]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    for softcap in (None, 3.0):
        attend(*tensors, Softmax(1.0, softcap), causal=True)
        attention._plain(*tensors, Softmax(1.0, softcap), True)
        attend_masked(*tensors, mask, Softmax(1.0, softcap))
        attend_with_rows(*tensors, Softmax(1.0, softcap))
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert mask.equal(torch.ones(6, 6, dtype=torch.bool).tril())
