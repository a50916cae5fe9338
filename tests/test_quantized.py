"""Vectors in a few bits, against the loops in `oracles/quantized.py`."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvlite.cache.bits import KVBits, parse_kv_bits
from kvlite.cache.quantization.affine import packed_codes, unpacked_codes
from kvlite.cache.quantization.by_channel import ByChannel
from kvlite.cache.quantization.hadamard import Hadamard, rotation
from kvlite.errors import SettingError

from .oracles import quantized as oracle

SHAPES = [(bits, group, dim) for bits in (2, 4, 8) for group, dim in [(16, 16), (32, 64), (64, 96)]]


def vectors(count: int, dim: int, seed: int = 0) -> Tensor:
    """Channels of very different sizes, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(dim, generator=generator) ** 3 * 10
    return torch.randn(2, 3, count, dim, generator=generator) * sizes + sizes


@pytest.mark.cases(3)
@pytest.mark.parametrize(("bits", "group", "dim"), SHAPES)
def test_vectors_come_back_as_the_oracle_says(bits: int, group: int, dim: int) -> None:
    x = vectors(7, dim)
    held = Hadamard.of(x, bits, group)
    size = dim // held.groups
    assert (held.count, held.dim, size) == (7, dim, min(group, dim) if dim != 96 else 32)
    back = held.read(slice(0, 7))
    for index in np.ndindex(2, 3, 7):
        expected, codes, steps = oracle.turned_and_rounded(x[index], bits, size)
        # float32 may round a number between two steps to the other side, or a step in half.
        apart = np.abs(hadamarded(back[index].double().numpy() - expected))
        close = 1e-4 + 2**-10 * np.abs(hadamarded(x[index].double().numpy())).max()
        assert (apart < close).mean() > 0.95 and (apart < np.array(steps) + close).all()
        same = held.codes[index].tolist() == oracle.bytes_of(codes, bits)
        assert same or bits == 8 or (apart > close).any()


def hadamarded(vector: np.ndarray) -> np.ndarray:
    return oracle.hadamard(len(vector)) @ vector


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([16, 48, 64, 128]),
    st.integers(0, 10**6),
    st.floats(1e-6, 1e3),
    st.floats(-1e3, 1e3),
)
def test_no_channel_is_off_by_more_than_half_a_step(
    bits: int, group: int, dim: int, seed: int, size: float, offset: float
) -> None:
    x = vectors(5, dim, seed) * size + offset
    held = Hadamard.of(x, bits, group)
    turned = (x.double() @ rotation(dim, x.device).double()).unflatten(-1, (held.groups, -1))
    back = (held.read(slice(0, 5)).double() @ rotation(dim, x.device).double()).unflatten(
        -1, (held.groups, -1)
    )
    half_steps = held.scales.mT.double()[..., None] / 2
    # Least values are kept in half precision, and so are steps, the smallest of which are 6e-8;
    # turning in float32 costs a little of the largest.
    slack = turned.abs().amax(-1, keepdim=True) * 2**-10 + 2**bits * 6e-8
    slack += x.abs().amax() * 1e-5
    assert bool(((turned - back).abs() <= half_steps * 1.001 + slack).all())


@pytest.fixture(params=["compiled", "torch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to form products on a CPU."""
    if request.param == "torch":
        monkeypatch.setattr("kvlite.cache.quantization.hadamard.has_compiled", lambda device: False)
    else:
        pytest.importorskip("numba")


@pytest.mark.cases(3)
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize(("bits", "group", "dim"), [*SHAPES, (4, 128, 128), (2, 16, 128)])
def test_products_are_those_of_the_restored_vectors(
    products: None, bits: int, group: int, dim: int, rows: int
) -> None:
    for count in (1, 40):
        held = Hadamard.of(vectors(count, dim, rows), bits, group)
        restored = held.read(slice(0, count)).double()
        queries, weights = torch.randn(2, 3, rows, dim), torch.rand(2, 3, rows, count)
        torch.testing.assert_close(
            held.dot(queries).double(), queries.double() @ restored.mT, atol=1e-3, rtol=1e-4
        )
        torch.testing.assert_close(
            held.weigh(weights).double(), weights.double() @ restored, atol=1e-3, rtol=1e-4
        )


@pytest.mark.long
def test_compiled_products_are_shared_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = pytest.importorskip("kvlite.ops.numba_quant")
    held = Hadamard.of(vectors(50, 64), 4, 32)
    # Layouts that are parts of larger tensors.
    queries, weights = torch.randn(2, 3, 5, 64)[:, :, ::2], torch.rand(2, 3, 3, 60)[..., 5:55]
    whole = held.dot(queries), held.weigh(weights)
    monkeypatch.setattr(compiled, "SHARED", 0)
    monkeypatch.setattr(compiled, "CHANNELS", 2 * 3 * 64 * 13)
    found = []
    for threads in (1, 2, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append((held.dot(queries), held.weigh(weights)))
    torch.testing.assert_close(found[0], whole, atol=1e-3, rtol=1e-4)
    for made in found[1:]:
        assert all(map(torch.equal, made, found[0]))


def test_products_of_torch_are_formed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlite.cache.quantization.hadamard.has_compiled", lambda device: False)
    held = Hadamard.of(vectors(50, 64), 4, 32)
    queries, weights = torch.randn(2, 3, 2, 64), torch.rand(2, 3, 2, 50)
    whole = held.dot(queries), held.weigh(weights)
    monkeypatch.setattr("kvlite.cache.segment.ELEMENTS_AT_ONCE", 2 * 3 * 64 * 7)
    assert len(list(held.blocks())) == 8
    torch.testing.assert_close(
        (held.dot(queries), held.weigh(weights)), whole, atol=1e-3, rtol=1e-4
    )


@given(st.sampled_from([2, 4, 8]), st.integers(1, 6), st.integers(0, 10**6))
def test_codes_survive_packing(bits: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, width * 8), generator=generator)
    packed = packed_codes(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, width * bits)
    assert unpacked_codes(packed, bits).long().equal(codes)
    assert packed[0].tolist() == oracle.bytes_of(codes[0].tolist(), bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nothing_and_too_much_are_held_as_well_as_can_be(bits: int) -> None:
    assert Hadamard.of(torch.zeros(1, 1, 2, 16), bits, 16).read(slice(0, 2)).abs().max() == 0
    huge = Hadamard.of(torch.full((1, 1, 2, 16), 1e9), bits, 16).read(slice(0, 2))
    assert bool(huge.isfinite().all())
    alike = Hadamard.of(torch.full((1, 1, 2, 16), 3.0), bits, 16).read(slice(0, 2))
    torch.testing.assert_close(alike, torch.full_like(alike, 3.0), atol=0.01, rtol=0)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_channels_are_rounded_over_tokens_as_in_kivi(bits: int) -> None:
    x = vectors(64, 16)
    held = ByChannel.empty((2, 3, 64, 16), bits, 32, x.device)
    held.write(slice(0, 32), x[:, :, :32])
    held.write(slice(32, 64), x[:, :, 32:])
    back = held.read(slice(0, 64))
    for index in np.ndindex(2, 3):
        expected = torch.from_numpy(oracle.by_channel(x[index], bits, 32))
        assert ((back[index] - expected).abs() < 1e-3).double().mean() > 0.97
    queries = torch.randn(2, 3, 4, 16)
    torch.testing.assert_close(held.dot(queries), queries @ back.mT, atol=1e-3, rtol=1e-4)
    assert held.read(slice(32, 64)).equal(back[:, :, 32:])
    assert held.joined(held).read(slice(64, 128)).equal(back)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("16", None),
        ("4", KVBits(4, 4)),
        (" K8V4 ", KVBits(8, 4)),
        ("2g32", KVBits(2, 2, 32)),
        ("kivi4", KVBits(4, 4, 32, form="kivi")),
        ("kivik4v2g64", KVBits(4, 2, 64, form="kivi")),
    ],
)
def test_bits_are_read(written: str, expected: KVBits | None) -> None:
    assert parse_kv_bits(written) == expected


@pytest.mark.parametrize(
    "written", ["", "3", "four", "k4", "4g7", "-4", "k8v5", "kivi", "16g32", "٤"]
)
def test_other_bits_are_refused_by_name(written: str) -> None:
    with pytest.raises(SettingError, match=f"--kv-bits {written!r} is not one of"):
        parse_kv_bits(written)


def test_bits_that_a_form_has_not_are_refused_with_those_it_has() -> None:
    with pytest.raises(SettingError, match="--kv-bits 'kivi3': kivi has 2, 4, 8 bits"):
        parse_kv_bits("kivi3")
