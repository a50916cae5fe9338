"""Loops compiled for recall and quantized caches, against torch's functions and plain sorting."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvlite.cache import KVBits, LayerCache, Selection
from kvlite.cache.quantization.hadamard import Hadamard, rotation
from kvlite.engine.quantized_attention import compiled, in_parts
from kvlite.offload import HostKVStore, Recall
from kvlite.offload.kv.index import Index
from kvlite.offload.kv.store import HostKVLayer
from kvlite.ops.softmax import Softmax

from .test_recall import full_head_group

codes = pytest.importorskip("kvlite.ops.numba_codes")
choice = pytest.importorskip("kvlite.ops.numba_recall")

BITS = [None, KVBits(8, 8), KVBits(4, 4), KVBits(8, 4, 16), KVBits(4, 2, 32)]


def test_every_finite_half_is_the_number_torch_says() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    halves = bits.view(torch.float16)
    finite = halves.isfinite()
    numbers = [codes.from_half(np.uint16(each)) for each in bits[finite].numpy().view(np.uint16)]
    assert torch.tensor(numbers, dtype=torch.float32).equal(halves[finite].float())
    back = [codes.to_half(np.float32(each)) for each in numbers]
    assert np.array_equal(np.array(back, np.uint16), bits[finite].numpy().view(np.uint16))


@given(st.floats(-60000, 60000, width=32), st.integers(-2, 2))
def test_numbers_are_rounded_to_halves_as_torch_does(number: float, nudge: int) -> None:
    """Beside, and exactly between two halves."""
    half = np.float16(number)
    after = np.nextafter(half, np.float16(np.inf))
    between = (np.float32(half) + np.float32(after)) / np.float32(2)
    for each in (np.float32(number), (between.view(np.int32) + np.int32(nudge)).view(np.float32)):
        expected = torch.tensor(each).half().view(torch.int16).item() & 0xFFFF
        assert int(codes.to_half(each)) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from([(16, 16), (64, 64), (64, 16), (96, 32), (48, 16)]),
    st.floats(1e-6, 1e3),
    st.integers(0, 10**6),
)
def test_a_vector_is_rounded_and_restored_as_by_torch(
    bits: int, size: tuple[int, int], spread: float, seed: int
) -> None:
    dim, group = size
    x = torch.randn(1, 1, 5, dim, generator=torch.Generator().manual_seed(seed)) * spread
    theirs, mine = Hadamard.of(x, bits, group), Hadamard.of(torch.zeros_like(x), bits, group)
    arrays = [mine.codes[0].numpy()]
    arrays += [each[0].numpy().view(np.uint16) for each in (mine.scales, mine.zeros)]
    back = np.empty((5, dim), np.float32)
    for place in range(5):
        codes.put(x[0, 0, place].numpy().copy(), *arrays, 0, place, bits)
    places = np.array([3, 1, 4, 0, 2])
    codes.restore(*(each[0] for each in arrays), places, bits, back)
    back[places] = back.copy()
    every = slice(0, 5)
    turned = torch.from_numpy(back) @ rotation(dim, x.device)
    torch.testing.assert_close(turned, mine.read(every)[0, 0], atol=1e-5 * spread, rtol=1e-5)
    # A number between two steps, or two halves, may be rounded either way.
    same = mine.codes == theirs.codes
    assert same.float().mean() > 0.95
    step = theirs.scales.float().max() * 1.01 + 1e-3 * spread
    assert (mine.read(every) - theirs.read(every)).abs().max() < step * dim**0.5


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 90), st.sampled_from([1, 3, 20]))
def test_the_largest_are_the_first_of_all_in_order(
    seed: int, some: int, count: int, kinds: int
) -> None:
    """Scores alike and zeros among them, ties go to the earlier; what is no number comes last."""
    random = np.random.default_rng(seed)
    scores = random.choice(random.random(kinds) ** random.integers(1, 40), some + 7)
    scores = scores.astype(np.float32)
    scores[random.random(some + 7) < 0.1] = random.choice([0, np.nan, 1e-42, 1])
    first, last = 3, some + 3
    found = choice.largest(scores, first, last, count)
    order = sorted(range(first, last), key=lambda at: (-np.nan_to_num(scores[at], nan=-1), at))
    assert found.tolist() == sorted(order[:count])


@pytest.mark.parametrize(("dim", "new"), [(16, 1), (64, 16), (96, 16), (128, 3)])
def test_few_keys_are_indexed_as_many(dim: int, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(1, 2, 50 + new, dim) * 3 + 1
    mine, theirs = (
        Index.of(keys[:, :, :50], torch.ones(1, 2, dim), 20).extended(50, keys[:, :, :0], 20)
        for _ in range(2)
    )
    mine.add(keys[:, :, 50:])
    monkeypatch.setattr("kvlite.offload.kv.index.has_compiled", lambda device: False)
    theirs.add(keys[:, :, 50:])
    assert mine.used == theirs.used == 50 + new
    assert mine.signs[:, :, : mine.used].equal(theirs.signs[:, :, : mine.used])
    torch.testing.assert_close(mine.sizes[:, :, : mine.used], theirs.sizes[:, :, : mine.used])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(BITS),
    st.sampled_from(BITS),
    st.sampled_from([(1, 16), (3, 64), (4, 96), (9, 32)]),
    st.integers(0, 10**6),
)
def test_compiled_loops_bring_back_what_torch_does(
    held: KVBits | None, kept: KVBits | None, size: tuple[int, int], seed: int
) -> None:
    """Several tokens in turn; what was remembered of an entry goes with it."""
    rows, dim = size
    random = torch.Generator().manual_seed(seed)
    count, slots = 100 + seed % 211, 60 + seed % 30
    everything = full_head_group(count, dim=dim, seed=seed).resized([count], bits=kept)
    source = everything.head_groups[0]
    at = torch.stack([torch.randperm(count, generator=random)[:slots].sort().values] * 2)
    chosen = Selection(source, at[None], (0, 2))
    pair = [LayerCache.gathered([chosen], [slots + 3], 2, bits=held) for _ in range(2)]
    store = HostKVStore([HostKVLayer(everything, None, count)], None, seen=count)
    mine, theirs = (Recall(store, 30) for _ in range(2))
    lines = []
    for layer in pair:
        rows_held = layer.head_groups[0].rows
        assert rows_held is not None
        rows_held[:] = 1.0
    for _ in range(3):
        queries = torch.randn(1, 2, rows, dim, generator=random)
        rough = torch.rand(1, 3, count, generator=random) ** 8
        mine.bring_back(0, pair[0].head_groups[0], queries, rough.clone())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvlite.offload.kv.recall.has_compiled", lambda device: False)
            theirs.bring_back(0, pair[1].head_groups[0], queries, rough.clone())
    assert mine.num_fetched == theirs.num_fetched > 0 and mine.num_requested == theirs.num_requested
    for layer in pair:
        head_group = layer.head_groups[0]
        positions = head_group.positions[0, :, :slots].sort(-1)
        along = positions.indices[..., None].expand(-1, -1, dim)
        sides = (head_group.keys[0].gather(1, along), head_group.values[0].gather(1, along))
        assert head_group.rows is not None
        remembered = head_group.rows[0, :, :, :slots].gather(
            2, positions.indices[:, None].expand(-1, 2, -1)
        )
        lines.append((positions.values, remembered, sides))
    (one, its, ours), (other, their, theirs_) = lines
    assert one.equal(other) and its.equal(their) and 0 < float(its.mean()) < 1
    for side, others, of in zip(ours, theirs_, (source.keys, source.values), strict=True):
        if held is None:
            torch.testing.assert_close(side, others, atol=1e-5, rtol=1e-5)
        # Which of them lie in exact slots is open.
        whole = of[0, [0, 2]].gather(1, one.long()[..., None].expand(-1, -1, dim))
        fewest = 16 if held is None else min(held.keys, held.values)
        most = {16: 1e-5, 8: 0.01, 4: 0.2, 2: 0.7}[fewest]
        assert (side - whole).norm() < most * whole.norm()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(KVBits(4, 4), 3, 64), (KVBits(8, 4, 16), 1, 16), (KVBits(4, 2, 32), 9, 96)]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([5, 40, 41, 150]),
    st.integers(0, 10**6),
)
def test_compiled_attention_is_that_in_parts(
    form: tuple[KVBits, int, int], softcap: float | None, count: int, seed: int
) -> None:
    bits, rows, dim = form
    everything = full_head_group(count, dim=dim, seed=seed).head_groups[0]
    at = torch.arange(count).expand(1, 2, -1)
    layer = LayerCache.gathered([Selection(everything, at, (0, 2))], [count + 9], bits=bits)
    (head_group,) = layer.head_groups
    if head_group.segment is None:
        return
    new = torch.randn(2, 1, 2, 1, dim)
    head_group.append(new[0], new[1], torch.tensor([count]))
    queries = torch.randn(1, 2, rows, dim)
    expected, weights = in_parts(queries, head_group, Softmax(1.0, softcap), True)
    found, own = compiled(queries, head_group, Softmax(1.0, softcap), True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(own, weights, atol=1e-6, rtol=1e-4)
    assert compiled(queries, head_group, Softmax(1.0, softcap), False)[1] is None
