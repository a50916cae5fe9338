"""MInference: what a chunk looks at, beside the oracle, and the methods it is put around."""

from typing import Any

import pytest
import torch

import kvlite
from kvlite.cache import LayerCache
from kvlite.config.settings import Settings
from kvlite.engine.layer_prefill import LayerPrefill
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.ops.softmax import Softmax
from tests.conftest import Tiny
from tests.oracles.vertical_slash import read_by_columns
from tests.test_api import held
from tests.test_registry import prompt

NONE = (torch.zeros(1, 64, 8), torch.zeros(1, 64, 8))


@pytest.mark.parametrize("chunk", [16, 10])
@pytest.mark.parametrize("head_groups", [[(0, 1)], [(1,), (0,)]])
@pytest.mark.parametrize(
    ("count", "near", "observed", "sinks"),
    [(6, 5, 4, 2), (3, 0, 9, 0), (8, 12, 1, 8), (40, 2, 4, 0)],
)
def test_a_chunk_sees_what_the_oracle_says(
    chunk: int, head_groups: list[tuple[int, ...]], count: int, near: int, observed: int, sinks: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 53, 8, generator=generator) * 1.5
    k, v = torch.randn(2, 1, 2, 53, 8, generator=generator) * 1.5
    learned = None if len(head_groups) == 1 else torch.randn(6, generator=generator) * 2
    spec = f"minference:columns={count},near={near},observed={observed},sinks={sinks}"
    layer = LayerCache(
        [(heads, 60) for heads in head_groups],
        batch=1,
        dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    positions = torch.arange(53, dtype=torch.int32)
    reader = LayerPrefill(layer, LayerPolicy(parse_method(spec), 60), positions, 53, NONE)
    parts = []
    for at in range(0, 53, chunk):
        given = (each[:, :, at : at + chunk] for each in (q, k, v))
        parts.append(reader.attend(*given, Softmax(0.35, None, learned)))
        reader.count()
    taking = torch.full((6,), -torch.inf) if learned is None else learned
    wanted = read_by_columns(q[0], k[0], v[0], 0.35, chunk, count, near, observed, sinks, taking)
    assert torch.cat(parts, 2)[0].double().numpy() == pytest.approx(wanted, abs=1e-5)


def conversation(tiny: Tiny, **settings: Any) -> kvlite.Conversation:
    return kvlite.Runner(tiny.model, Settings().replace(settings)).conversation()


@pytest.mark.parametrize("inner", ["full", "kvx", "pyramidkv:window=8", "simlayerkv", "kvzip"])
def test_short_texts_are_read_exactly(llama: Tiny, inner: str) -> None:
    answers = [
        conversation(llama, method=method, budget=60, chunk=32).generate(
            prompt(), max_new_tokens=8, ignore_eos=True
        )
        for method in (inner, f"minference+{inner}")
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].kv_bytes == answers[1].kv_bytes


def test_long_texts_are_not_and_everything_stays(llama: Tiny) -> None:
    spec = "minference:columns=8,near=4,observed=4,sinks=2"
    sparse, whole = (conversation(llama, method=each, chunk=16) for each in (spec, "full"))
    for talk in (sparse, whole):
        talk.read(prompt())
    assert held(sparse) == held(whole)
    for layer, same in ((0, True), (3, False)):
        read, exact = (
            talk.cache.layers[layer].head_groups[0].keys[:, :, :200] for talk in (sparse, whole)
        )
        assert torch.allclose(read, exact, atol=1e-3) == same


def test_what_is_kept_is_up_to_the_method_it_holds(llama: Tiny) -> None:
    spec = "minference:columns=8,near=4,observed=4,sinks=2+streaming"
    talk = conversation(llama, method=spec, budget=20, chunk=16)
    talk.read(prompt())
    assert held(talk) == [[*range(4), *range(184, 200)]] * 8
    talk.generate([7], max_new_tokens=6, ignore_eos=True)
    assert talk.cache.entries_mean == 20


@pytest.mark.parametrize(
    "inner", ["h2o", "lminfinite", "pyramidinfer", "uncomp:stage=true", "minference+kvx"]
)
def test_methods_that_read_in_their_own_way_are_refused(inner: str) -> None:
    with pytest.raises(SettingError, match="minference holds no"):
        parse_method(f"minference+{inner}")
