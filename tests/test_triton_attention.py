"""Attention over quantized entries: Triton's interpreter on a CPU, the kernels on a CUDA device."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlite.cache.quantization.hadamard import Hadamard, rotation
from kvlite.engine.quantized_attention import fused, in_parts
from kvlite.ops.softmax import Softmax
from tests.interpreted import DEVICE, kernels
from tests.oracles.quantized_attention import naive
from tests.test_packed import head_groups

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with kernels("kvlite.ops.triton_decode") as module:
        yield module


def entries(
    shape: tuple[int, int, int, int], bits: int, group: int, seed: int, spread: float = 1.0
) -> Hadamard:
    """Any codes, with scales and zeros as of vectors of about unit size, times `spread`."""
    generator = torch.Generator().manual_seed(seed)
    made = Hadamard.empty(shape, bits, group, torch.device("cpu"))
    made.codes.random_(0, 256, generator=generator)
    steps = spread * 4 / (2**bits - 1)
    made.scales.copy_(torch.rand(made.scales.shape, generator=generator) * steps)
    made.zeros.copy_(-made.scales.float() * (2**bits - 1) / 2)
    made.zeros.add_(torch.randn(made.zeros.shape, generator=generator), alpha=spread / 4)
    return made


def asked(shape: tuple[int, int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Queries and shifts."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5
    return queries, torch.randn(shape[:3], generator=generator)


def moved(each: Hadamard) -> Hadamard:
    return Hadamard(*(tensor.to(DEVICE) for tensor in each.tensors), each.bits)


def plain(each: Hadamard) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    return each.codes.numpy(), each.scales.numpy(), each.zeros.numpy(), each.bits


def check(
    kernel: ModuleType,
    queries: Tensor,
    keys: Hadamard,
    values: Hadamard,
    shift: Tensor,
    softcap: float | None = None,
    want_logits: bool = True,
) -> None:
    """Compare with the oracle."""
    expected = naive(queries.numpy(), plain(keys), plain(values), shift.numpy(), softcap)
    logits = None
    if want_logits:
        room = torch.full((*queries.shape[:3], keys.count + 5), 7.0, device=DEVICE)
        logits = room[..., : keys.count]
    out, lse = kernel.attend_quantized(
        queries.to(DEVICE),
        moved(keys),
        moved(values),
        rotation(keys.dim, torch.device(DEVICE)),
        shift.to(DEVICE),
        softcap,
        logits=logits,
    )
    assert out.dtype == lse.dtype == torch.float32
    # Weights are good to 2^-16, and their error counts once a step, of which there are up to 255.
    near = {"rtol": 5e-4, "atol": 5e-4}
    np.testing.assert_allclose(out.cpu().numpy(), expected[0], **near)
    np.testing.assert_allclose(lse.cpu().numpy(), expected[1], **near)
    if logits is not None:
        np.testing.assert_allclose(logits.cpu().numpy(), expected[2], **near)
        assert (room[..., keys.count :] == 7.0).all()
    # As many, where only the device knows it, of storage with room for more; and seen there.
    storages = [moved(each.joined(each).joined(each)) for each in (keys, values)]
    count = torch.tensor([keys.count], device=DEVICE)
    seen = [each.first(keys.count) for each in storages]
    for (k, v), counted in ((storages, count), (seen, None)):
        again = kernel.attend_quantized(
            queries.to(DEVICE),
            *(k, v, rotation(keys.dim, torch.device(DEVICE)), shift.to(DEVICE), softcap),
            count=counted,
        )
        torch.testing.assert_close(again, (out, lse), rtol=1e-3, atol=1e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("dim", "rows", "key_bits", "key_group", "value_bits", "value_group"),
    [
        (128, 4, 4, 64, 4, 64),
        (128, 1, 2, 32, 2, 32),
        (128, 8, 8, 128, 2, 64),
        (64, 3, 4, 32, 8, 64),
        (64, 16, 2, 64, 4, 16),
        (96, 1, 4, 64, 2, 32),
        (80, 2, 2, 32, 4, 80),
        (80, 5, 8, 16, 8, 32),
        (16, 7, 2, 16, 2, 64),
        (32, 1, 8, 8, 4, 8),
        (256, 2, 4, 64, 4, 128),
    ],
)
def test_layouts_of_codes(
    kernel: ModuleType,
    dim: int,
    rows: int,
    key_bits: int,
    key_group: int,
    value_bits: int,
    value_group: int,
) -> None:
    """Planes and groups of channels that meet in every way, over two tiles."""
    queries, shift = asked((1, 2, rows, dim), 0)
    keys = entries((1, 2, 71, dim), key_bits, key_group, 1)
    values = entries((1, 2, 71, dim), value_bits, value_group, 2)
    check(kernel, queries, keys, values, shift)


@pytest.mark.cases(1)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_splits_of_heads(
    kernel: ModuleType, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits of several tiles, the last of them partly filled."""
    monkeypatch.setattr(kernel, "LEAST_TILES", 1)
    queries, shift = asked((2, 2, 3, 32), 3)
    keys, values = (entries((2, 2, 260, 32), 4, 32, seed) for seed in (4, 5))
    check(kernel, queries, keys, values, shift, softcap)


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [384, 400])
def test_many_splits_are_one_attention(
    kernel: ModuleType, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More splits than are merged at once: a tile each, or two each and the last ones empty."""
    monkeypatch.setattr(kernel, "TILE", 16)
    monkeypatch.setattr(kernel, "splits_for", lambda heads, count, device: 24)
    queries, shift = asked((1, 1, 2, 16), 6)
    keys, values = (entries((1, 1, count, 16), 4, 16, seed) for seed in (7, 8))
    check(kernel, queries, keys, values, shift, want_logits=False)


def test_no_entries_weigh_nothing(kernel: ModuleType) -> None:
    queries, shift = asked((1, 2, 4, 64), 9)
    keys, values = (entries((1, 2, 0, 64), 4, 64, seed) for seed in (10, 11))
    check(kernel, queries, keys, values, shift)


def test_splits_keep_processors_busy(kernel: ModuleType) -> None:
    """As many programs as they take at once, none with less than a few tiles."""
    cpu = torch.device("cpu")
    wanted = 8 * kernel.PROGRAMS_PER_PROCESSOR
    assert kernel.splits_for(1, 1 << 20, cpu) == wanted
    assert kernel.splits_for(5, 1 << 20, cpu) == -(-wanted // 5)
    assert kernel.splits_for(wanted + 1, 1 << 20, cpu) == 1
    assert kernel.splits_for(1, kernel.TILE * kernel.LEAST_TILES + 1, cpu) == 2
    assert kernel.splits_for(1, 0, cpu) == 1


def test_part_of_a_larger_room(kernel: ModuleType) -> None:
    """Heads, entries and groups need not lie close together."""
    queries, shift = asked((2, 2, 2, 64), 12)
    rooms = [entries((2, 4, 50, 64), 4, 32, seed) for seed in (13, 14)]
    keys, values = (
        Hadamard(
            room.codes[:, 1:3, :37], room.scales[:, 1:3, :, :37], room.zeros[:, 1:3, :, :37], 4
        )
        for room in rooms
    )
    transposed = shift.mT.contiguous().mT
    check(kernel, queries, keys, values, transposed)


def test_one_entry_outweighs_all(kernel: ModuleType) -> None:
    """Logits far apart, the highest in a late tile."""
    queries, shift = asked((1, 1, 4, 64), 15)
    keys = entries((1, 1, 150, 64), 8, 64, 16, spread=30.0)
    values = entries((1, 1, 150, 64), 8, 64, 17)
    check(kernel, queries, keys, values, shift * 1000)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape(kernel: ModuleType, data: st.DataObject) -> None:
    dim = data.draw(st.sampled_from([16, 32, 48, 64, 80, 96]))
    rows = data.draw(st.integers(1, 9))
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    count = data.draw(st.integers(0, 90))
    queries, shift = asked((batch, heads, rows, dim), data.draw(st.integers(0, 99)))
    keys, values = (
        entries(
            (batch, heads, count, dim),
            data.draw(st.sampled_from([2, 4, 8])),
            data.draw(st.sampled_from([16, 32, 64, 128])),
            seed,
        )
        for seed in (1, 2)
    )
    softcap = data.draw(st.none() | st.floats(0.5, 50.0))
    check(kernel, queries, keys, values, shift, softcap, data.draw(st.booleans()))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "softmax", [Softmax(1.0), Softmax(1.0, 2.0, torch.randn(4))], ids=["plain", "sinks"]
)
def test_an_answer_is_attended_to_the_same_by_the_kernel(
    kernel: ModuleType, softmax: Softmax
) -> None:
    """Exact entries before and after the quantized ones, merged."""
    if softmax.sinks is not None:
        softmax = replace(softmax, sinks=softmax.sinks.to(DEVICE))
    for head_group in head_groups(DEVICE.type):
        heads = len(head_group.heads)
        queries = torch.randn(1, heads, 4 // heads, 16, device=DEVICE)
        out, weights = in_parts(queries, head_group, softmax, True)
        ours, our_weights = fused(queries, head_group, softmax, True)
        torch.testing.assert_close(ours, out, atol=5e-4, rtol=5e-4)
        torch.testing.assert_close(our_weights, weights, atol=5e-4, rtol=5e-4)
        alone, nothing = fused(queries, head_group, softmax, False)
        assert nothing is None and alone.equal(ours)
