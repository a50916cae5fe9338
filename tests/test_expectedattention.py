"""ExpectedAttention against its definition in loops, from queries that no one has rotated."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.engine.layer_prefill import LayerPrefill
from kvlite.engine.prefill import Prefill
from kvlite.engine.query_stats import QueryStatistics
from kvlite.engine.slices import in_one_go
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies

from .conftest import Tiny, make_tiny
from .oracles.expected import expected_scores
from .test_api import held
from .test_engine import empty, positions, run
from .test_rotary import caught


@torch.inference_mode()
def read(
    tiny: Tiny, ids: Tensor, method: str, chunk: int = 16
) -> tuple[int, Tensor, LayerPrefill, Prefill]:
    """The first layer that sees everything, what came into it, and its reader."""
    model = tiny.model
    policies = layer_policies(parse_method(method), model.shape, 20, ids.shape[1])
    reading = Prefill(model, empty(model, len(ids)), ids, policies, chunk=chunk)
    layer = model.shape.full_layers[0]
    for index in range(layer):
        in_one_go(reading.read_layer(index))
    hidden = reading.hidden.clone()
    return layer, hidden, in_one_go(reading.read_layer(layer)), reading


@pytest.mark.cases(6)
@pytest.mark.parametrize("options", ["", ":use_covariance=false", ":use_values=false,future=7"])
@pytest.mark.parametrize(
    "name",
    ["llama", "llama-mha", "llama-rope-yarn", "qwen3", "gemma3", "phi3-partial", "phi3-longrope"],
)
def test_votes_are_the_oracles_numbers(name: str, options: str) -> None:
    tiny, spec = make_tiny(name), f"expectedattention{options}"
    torch.manual_seed(0)
    # Spread wide, so that the covariance tells.
    tiny.model.module.model.embed_tokens.weight.data *= 30
    for module in tiny.model.layers:
        for projection in ("q_proj", "k_proj", "qkv_proj"):
            if hasattr(module.self_attn, projection):
                getattr(module.self_attn, projection).weight.data *= 8
    method, ids = parse_method(spec), torch.randint(3, 199, (2, 60))
    layer, hidden, reader, reading = read(tiny, ids, spec)
    view = reader.view(layer)
    (head_group,) = view.head_groups
    votes = method.score(view.head_groups[0], view.window)
    cos, sin = reading.rotations[layer]
    still = torch.ones_like(cos), torch.zeros_like(sin)
    queries, _ = caught(tiny.model, layer, hidden, still)
    future = 7 if "future" in options else 512
    coming = [each[0].numpy() for each in tiny.model.rotations(60, future)[layer]]
    for sequence in range(2):
        expected = expected_scores(
            queries[sequence, :, 4:],
            head_group.keys[sequence, :, 4:60],
            head_group.values[sequence, :, 4:60],
            *coming,
            view.window.softmax.scale,
            "covariance=false" not in options,
            "values=false" not in options,
        )
        assert np.allclose(votes[sequence, :, 4:].numpy(), expected, rtol=1e-3, atol=1e-6)
    assert not votes[..., :4].any()


@pytest.mark.parametrize("chunk", [1, 5, 59, 1000])
def test_any_chunk_gives_the_same_statistics(llama: Tiny, chunk: int) -> None:
    torch.manual_seed(1)
    ids = torch.randint(3, 199, (2, 60))
    one, other = (
        read(llama, ids, "expectedattention", size)[2].view(0).window.expected
        for size in (chunk, 16)
    )
    assert one is not None and other is not None
    for ours, theirs in ((one.mean, other.mean), (one.covariance, other.covariance)):
        assert ours is not None and theirs is not None
        assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max().clamp(min=1)


def test_small_spreads_about_large_means_are_not_lost() -> None:
    torch.manual_seed(2)
    q = torch.randn(1, 2, 300, 8) * 0.01 + 100
    statistics, still = QueryStatistics(), (torch.ones(1, 1, 8), torch.zeros(1, 1, 8))
    for part in q.split(7, 2):
        statistics = statistics.joined(part, still, covariance=True)
    expected = statistics.expected(still, still)
    assert expected is not None and expected.covariance is not None
    for head in range(2):
        exact = torch.tensor(np.cov(q[0, head].double().numpy().T, bias=True))
        assert (expected.covariance[0, head] - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize("more", ["", ",per_head=true,pool=5", ",layers=global", ",sinks=0"])
def test_the_best_by_score_stay_and_the_sinks(llama: Tiny, more: str) -> None:
    cache, sinks = empty(llama.model), 0 if "sinks=0" in more else 4
    method = f"expectedattention:future=64{more}"
    run(llama.model, cache, torch.randint(3, 199, (1, 120)), 0, method=method, budget=24)
    lines = positions(cache)
    assert sum(len(head) for layer in lines for head in layer) == 24 * 8
    assert all(set(range(sinks)) <= head for layer in lines for head in layer)
    assert len({tuple(sorted(head)) for layer in lines for head in layer}) > 1


def test_a_later_turn_is_judged_by_its_own_queries(llama: Tiny) -> None:
    talk = Conversation(llama.model, Settings(method="expectedattention", budget="20"))
    talk.read(list(range(3, 90)))
    first = held(talk)
    talk.read([5])  # a single query has no spread
    assert all(len(line) == 20 and line[:4] == [0, 1, 2, 3] for line in held(talk))
    assert held(talk) != first


def test_wrapped_it_is_told_as_well(llama: Tiny) -> None:
    cache, ids = empty(llama.model), torch.randint(3, 199, (1, 120))
    spec = "simlayerkv:threshold=1+expectedattention"
    run(llama.model, cache, ids, 0, method=spec, budget=24)
    alone = empty(llama.model)
    run(llama.model, alone, ids, 0, method="expectedattention", budget=24)
    assert positions(cache) == positions(alone)


def test_queries_are_counted_only_for_who_asks(llama: Tiny) -> None:
    _, _, reader, _ = read(llama, torch.randint(3, 199, (1, 60)), "snapkv:window=4")
    assert reader.statistics.count == 0 and reader.view(0).window.expected is None
    _, _, reader, _ = read(llama, torch.randint(3, 199, (1, 60)), "expectedattention")
    assert reader.statistics.count == 56


@pytest.mark.parametrize(
    "method", ["expectedattention:use_covariance=false", "triattention", "expectedattention"]
)
def test_a_covariance_is_formed_only_where_it_is_read(llama: Tiny, method: str) -> None:
    _, _, reader, _ = read(llama, torch.randint(3, 199, (1, 60)), method)
    expected = reader.view(0).window.expected
    assert expected is not None
    assert (expected.covariance is not None) == (method == "expectedattention")
