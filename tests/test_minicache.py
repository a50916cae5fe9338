"""MiniCache: merged layers against loops, their bytes, and answers against a dense reference."""

import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from kvlite.cache import KVCache, LayerCache
from kvlite.cache.pair import Half
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError, Stopped
from kvlite.memory.meter import TensorMeter
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.methods.minicache import MiniCache
from tests.conftest import Tiny, make_tiny
from tests.oracles import pairs
from tests.test_engine import empty, positions

DIM = 8


def vectors(seed: int, *shape: int) -> Tensor:
    return torch.randn(2, *shape, DIM, generator=torch.Generator().manual_seed(seed))


def layer_of(
    keys: Tensor, values: Tensor, split: list[tuple[int, ...]] | None = None
) -> LayerCache:
    batch, heads, n, dim = keys.shape
    sizes = [(each, n) for each in split or [tuple(range(heads))]]
    layer = LayerCache(sizes, batch=batch, dim=dim, dtype=keys.dtype, device=keys.device)
    for head_group in layer.head_groups:
        own = list(head_group.heads)
        head_group.append(keys[:, own], values[:, own], torch.arange(n))
    return layer


def merged(method: MiniCache, lower: LayerCache, upper: LayerCache) -> list[LayerCache]:
    segments = zip(*method.merge(lower.head_groups, upper.head_groups), strict=True)
    return [each.behind(own, 0) for each, own in zip((lower, upper), segments, strict=True)]


def half(layer: LayerCache) -> Half:
    segment = layer.head_groups[0].segment
    assert isinstance(segment, Half)
    return segment


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    n=st.integers(1, 41),
    t=st.floats(0, 1),
    retain=st.sampled_from([0, 0.05, 0.1, 0.5, 1]),
)
def test_what_is_restored_equals_the_oracle(
    seed: int, batch: int, heads: int, n: int, t: float, retain: float
) -> None:
    lower, upper = vectors(seed, batch, heads, n), vectors(seed + 100, batch, heads, n)
    method = MiniCache(t=t, retain=retain)
    layers = merged(method, layer_of(*lower), layer_of(*upper))
    count = math.ceil(round(retain * n, 6))
    for kind in range(2):
        read = [(each.head_groups[0].keys, each.head_groups[0].values)[kind] for each in layers]
        held = (half(layers[0]).keys, half(layers[0]).values)[kind]
        for b in range(batch):
            for h in range(heads):
                below, above, kept = pairs.merged(lower[kind, b, h], upper[kind, b, h], t, count)
                assert held.retained[b, h].tolist() == kept
                for ours, theirs in zip(read, (below, above), strict=True):
                    torch.testing.assert_close(
                        ours[b, h].double(), torch.from_numpy(theirs), atol=2e-5, rtol=0
                    )


def test_vectors_that_are_parallel_opposed_or_zero() -> None:
    lower = torch.zeros(1, 1, 4, DIM)
    lower[..., 0] = torch.tensor([2.0, 2.0, 0.0, 0.0])
    upper = torch.zeros(1, 1, 4, DIM)
    upper[..., 0] = torch.tensor([3.0, -3.0, 3.0, 0.0])
    below, above = merged(MiniCache(retain=0), layer_of(lower, lower), layer_of(upper, upper))
    for restored, line in ((below, [2.0, -2.0, 0.0, 0.0]), (above, [3.0, -3.0, 3.0, 0.0])):
        assert restored.head_groups[0].keys[0, 0, :, 0].tolist() == pytest.approx(line, abs=1e-5)
        assert not restored.head_groups[0].keys[..., 1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_retained_tokens_are_bit_exact_and_the_most_different_ones(dtype: torch.dtype) -> None:
    lower, upper = vectors(4, 3, 2, 61).to(dtype), vectors(5, 3, 2, 61).to(dtype)
    layers = merged(MiniCache(), layer_of(*lower), layer_of(*upper))
    slots = half(layers[0]).keys.retained
    assert slots.shape == (3, 2, 4) and slots.dtype == torch.int32
    for layer, exact in zip(layers, (lower[0], upper[0]), strict=True):
        place = slots.long()[..., None].expand(-1, -1, -1, DIM)
        assert layer.head_groups[0].keys.gather(2, place).equal(exact.gather(2, place))
    cosine = torch.cosine_similarity(lower[0].float(), upper[0].float(), dim=-1)
    kept = torch.zeros(3, 2, 61, dtype=torch.bool).scatter_(2, slots.long(), True)
    for b in range(3):
        for h in range(2):
            assert cosine[b, h][kept[b, h]].max() < cosine[b, h][~kept[b, h]].min()


def test_what_comes_later_is_merged_behind_it_and_leaves_it_as_it_was() -> None:
    method, lower, upper = MiniCache(), vectors(8, 2, 2, 70), vectors(9, 2, 2, 70)
    layers = merged(method, layer_of(*lower[..., :40, :]), layer_of(*upper[..., :40, :]))
    before = [each.head_groups[0].keys.clone() for each in layers]
    grown = [each.resized([70]) for each in layers]
    for each, exact in zip(grown, (lower, upper), strict=True):
        each.head_groups[0].append(exact[0][:, :, 40:], exact[1][:, :, 40:], torch.arange(40, 70))
        assert each.head_groups[0].segment is not None
    later = merged(method, layer_of(*lower[..., 40:, :]), layer_of(*upper[..., 40:, :]))
    for again, old, new in zip(merged(method, *grown), before, later, strict=True):
        head_group = again.head_groups[0]
        assert head_group.positions[0, 0].tolist() == list(range(70))
        assert head_group.keys[:, :, :40].equal(old)
        assert head_group.keys[:, :, 40:].equal(new.head_groups[0].keys)
        assert head_group.values[:, :, 40:].equal(new.head_groups[0].values)
        assert again.residual_lengths == [(2, 0)]


def test_layers_that_hold_different_tokens_are_not_merged() -> None:
    keys = vectors(10, 1, 2, 9)
    one, split = layer_of(*keys), layer_of(*keys, split=[(0,), (1,)])
    moved, shorter = layer_of(*keys), layer_of(*keys[..., :8, :])
    moved.positions[0, 3] = 99
    pair = merged(MiniCache(), one, layer_of(*keys))
    for other in (split, moved, shorter, pair[1]):
        assert MiniCache().merge(one.head_groups, other.head_groups) == []
        assert MiniCache().merge(other.head_groups, one.head_groups) == []
    stranger = merged(MiniCache(), one, layer_of(*keys))[1]
    assert MiniCache().merge(pair[0].head_groups, stranger.head_groups) == []
    assert (
        len(MiniCache().merge(split.head_groups, layer_of(*keys, split=[(0,), (1,)]).head_groups))
        == 2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_one_direction_and_two_magnitudes(dtype: torch.dtype) -> None:
    n, batch, heads = 200, 3, 2
    below, above = (layer_of(*vectors(seed, batch, heads, n).to(dtype)) for seed in (1, 2))
    layers = merged(MiniCache(), below, above)
    item, retained = dtype.itemsize, 10
    a_head = 2 * n * (DIM + 2) * item + 2 * 2 * retained * DIM * item
    indices = 2 * retained * 4 + n * 4
    assert KVCache(layers).nbytes == batch * heads * (a_head + indices)
    assert KVCache(layers).nbytes < sum(layer.nbytes for layer in layers)
    tensors = [half(layers[0]).positions]
    for layer in layers:
        for each in (half(layer).keys, half(layer).values):
            tensors += [*each.units.tensors, each.retained, each.magnitudes, each.exact]
    held = {id(each): each.untyped_storage().nbytes() for each in tensors}
    assert KVCache(layers).nbytes == sum(held.values())


def test_pairs() -> None:
    assert MiniCache().pairs([None] * 32) == [(i, i + 1) for i in range(16, 32, 2)]
    assert MiniCache().pairs([None] * 30) == [(i, i + 1) for i in range(15, 29, 2)]
    assert MiniCache(start=0).pairs([None] * 3) == [(0, 1)]
    assert MiniCache(start=1).pairs([None] * 3) == []
    assert MiniCache(start=0).pairs([None, None, 9, None, 9, None, None]) == [(0, 1), (5, 6)]
    assert MiniCache(start=0).pairs([9, None] * 4) == []
    for wrong in ("start=1.5", "t=-0.1", "retain=2"):
        with pytest.raises(SettingError, match="from 0 to 1"):
            parse_method(f"minicache:{wrong}")
    with pytest.raises(SettingError, match="simlayerkv holds no minicache"):
        parse_method("simlayerkv+minicache")


# --- in the engine -------------------------------------------------------------------------------


class Dense:
    """transformers' own model, whose cache is written over with what loops restore."""

    def __init__(self, reference: Any, t: float = 0.6) -> None:
        self.reference = reference
        self.t = t
        self.cache = DynamicCache()
        self.merged = 0

    def read(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            out = self.reference(ids, past_key_values=self.cache, use_cache=True)
        return out.logits[:, -1]

    def merge(self, layers: list[tuple[int, int]]) -> None:
        count = self.cache.get_seq_length() - self.merged
        retain = math.ceil(count / 20)
        for pair in layers:
            below, above = (self.cache.layers[index] for index in pair)
            for kind in ("keys", "values"):
                one, two = getattr(below, kind), getattr(above, kind)
                for b in range(one.shape[0]):
                    for h in range(one.shape[1]):
                        new = (one[b, h, self.merged :], two[b, h, self.merged :])
                        restored = pairs.merged(*new, self.t, retain)[:2]
                        for old, each in zip(new, restored, strict=True):
                            old.copy_(torch.from_numpy(each))
        self.merged += count


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "spec", "merged_layers"),
    [
        ("llama", "minicache", [(2, 3)]),
        ("llama", "minicache:start=0,t=0.3", [(0, 1), (2, 3)]),
        ("llama-mha", "minicache", [(2, 3)]),
        ("qwen3", "minicache:start=0.25", [(1, 2)]),
        ("gemma2", "minicache:start=0", []),
    ],
)
def test_answers_over_three_turns_equal_attention_to_what_the_oracle_restores(
    name: str, spec: str, merged_layers: list[tuple[int, int]]
) -> None:
    tiny = make_tiny(name)
    method, cache = parse_method(spec), empty(tiny.model, batch=3)
    assert isinstance(method, MiniCache)
    dense = Dense(tiny.reference, method.t)
    torch.manual_seed(4)
    for count, merges in ((90, True), (10, False), (50, True)):
        prompt = torch.randint(3, 199, (3, count))
        policies = layer_policies(method, tiny.model.shape, 24, cache.seen + count)
        logits = prefill(tiny.model, cache, prompt, policies, reserve=8, chunk=32)
        assert (logits - dense.read(prompt)).abs().max() < 1e-4
        if merges:
            dense.merge(merged_layers)
        for index, layer in enumerate(cache.layers):
            paired = index in {each for pair in merged_layers for each in pair}
            assert layer.computed == paired
        for _ in range(8):
            token = logits.argmax(-1)
            logits = decode_step(tiny.model, cache, token, policies)
            assert (logits - dense.read(token[:, None])).abs().max() < 1e-4


def test_an_answer_never_restores_a_whole_layer(llama: Tiny) -> None:
    model, count = llama.model, 900
    one_layer = model.shape.full_kv_bytes(count, 4) // model.shape.layers
    cache = empty(model)
    method = parse_method("minicache:start=0")
    policies = layer_policies(method, model.shape, 24, count)
    with TensorMeter(model.module.parameters()) as meter:
        start = meter.live
        prefill(model, cache, torch.randint(3, 199, (1, count)), policies, reserve=64, chunk=16)
        assert meter.live - start == pytest.approx(cache.nbytes, rel=0.01)
        held, before = cache.nbytes, meter.live
        meter.peak = before
        decode_step(model, cache, torch.tensor([7]), policies)
        assert meter.peak - before < 0.5 * one_layer
    assert held < 0.8 * model.shape.full_kv_bytes(count + 64, 4)


def held_keys(cache: KVCache) -> list[Tensor]:
    return [
        head_group.keys[:, :, : head_group.used].clone()
        for layer in cache.layers
        for head_group in layer.head_groups
    ]


def test_stopping_while_a_later_turn_is_read_loses_nothing(llama: Tiny) -> None:
    given = Settings(method="minicache", budget="24")
    torch.manual_seed(6)
    first, second = (torch.randint(3, 199, (n,)).tolist() for n in (90, 60))
    stopped, fresh = Conversation(llama.model, given), Conversation(llama.model, given)
    for talk in (stopped, fresh):
        talk.generate(first, max_new_tokens=6, ignore_eos=True)
    before, held = positions(stopped.cache), stopped.cache.nbytes
    keys = held_keys(stopped.cache)
    for last in (3, 12, 15):
        stop, chunks = threading.Event(), 0

        def progress(done: int, total: int, last: int = last, stop: Any = stop) -> None:
            nonlocal chunks
            chunks += 1
            if chunks == last:
                stop.set()

        with pytest.raises(Stopped):
            stopped.generate(second, callbacks=Callbacks(progress=progress, cancel=stop), chunk=16)
        assert positions(stopped.cache) == before and stopped.cache.nbytes == held
        after = held_keys(stopped.cache)
        assert all(old.equal(new) for old, new in zip(keys, after, strict=True))
    answers = [
        talk.generate(second, max_new_tokens=12, ignore_eos=True) for talk in (stopped, fresh)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert stopped.cache.nbytes == fresh.cache.nbytes
