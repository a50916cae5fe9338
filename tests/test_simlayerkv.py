"""SimLayerKV: lazy layers by hand and by a dense oracle, planted ones, and wrapped methods."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.base import LayerView
from kvlite.methods.kvx import KVX
from kvlite.methods.layer_policy import layer_policies
from kvlite.methods.simlayerkv import SimLayerKV
from kvlite.methods.streaming import Streaming
from tests.conftest import Tiny, make_tiny
from tests.oracles import attention
from tests.test_engine import empty
from tests.test_methods import make_case


def oracle_share(case: Any, b: int, rows: int, line: int, sinks: int, own: bool) -> float:
    """Eq. 1 and 2 with loops: a mean over query heads and rows."""
    queries, keys, asked, at, scale = case.sequence(b)
    weights = attention.attention_rows(queries[:, -rows:], keys, asked[-rows:], at, scale)
    heads, _, slots = weights.shape
    group = heads // len(at)
    shares = []
    for head in range(heads):
        for row, position in enumerate(asked[-rows:]):
            share = 0.0
            for slot in range(slots):
                distance = position - at[head // group][slot]
                near = 0 <= distance < line - sinks if own else 0 < distance <= line - sinks
                if at[head // group][slot] < sinks or near:
                    share += float(weights[head, row, slot])
            shares.append(share)
    return math.fsum(shares) / len(shares)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("rows", "line", "sinks"), [(6, 15, 4), (1, 9, 0), (3, 30, 2)])
@pytest.mark.parametrize("compressed", [False, True])
def test_the_share_of_attention_equals_the_oracle(
    compressed: bool, rows: int, line: int, sinks: int, own: bool
) -> None:
    case = make_case(batch=2, compressed=compressed, seed=3)
    method = SimLayerKV(sinks=sinks, last=rows, own=own)
    ours = method.attention_to_line(case.layer.head_groups, case.window.last(rows), line)
    shares = [oracle_share(case, b, rows, line, sinks, own) for b in range(2)]
    assert ours == pytest.approx(min(shares), abs=1e-6)
    assert 0 <= ours <= 1


def test_the_threshold_is_strict_and_the_line_no_longer_than_the_budget() -> None:
    case = make_case(seed=3)
    share = SimLayerKV(recent=11).attention_to_line(case.layer.head_groups, case.window, 15)
    view = LayerView(0, case.layer.head_groups, case.window, 41)
    below = float(np.nextafter(share, 0))
    assert SimLayerKV(recent=11, threshold=share).resolve(view)[0].name == "full"
    lazy = SimLayerKV(recent=11, threshold=below).resolve(view)
    assert lazy == (Streaming(4, roll=False), 15)
    small = SimLayerKV(threshold=0, bound_decode=True, inner=KVX())
    assert small.resolve(LayerView(0, view.head_groups, view.window, 20)) == (Streaming(4), 20)
    assert small.resolve(LayerView(0, view.head_groups, view.window, 41))[0] == KVX()


def planted(lazy: set[int]) -> Tiny:
    """A model whose lazy layers see only sinks: all keys are alike but the first tokens', which
    every query points at. The other layers attend evenly."""
    tiny = make_tiny("llama")
    for module in (tiny.reference, tiny.model.module):
        for layer in module.model.layers:
            for name in ("q_proj", "k_proj"):
                getattr(layer.self_attn, name).weight.data.zero_()
    return tiny if not lazy else _sink(tiny, lazy)


def _sink(tiny: Tiny, lazy: set[int]) -> Tiny:
    """Token 3, which begins every prompt, alone has a large key where all queries look."""
    for module in (tiny.reference, tiny.model.module):
        embedding = module.model.embed_tokens.weight.data
        embedding[:, 0], embedding[:, 1] = 0.0, 3.0
        embedding[3, 0] = 30.0
        for index in lazy:
            own = module.model.layers[index].self_attn
            width = own.head_dim
            for head in range(own.k_proj.weight.shape[0] // width):
                # The last pair of dimensions turns slowest: half a head away from each other.
                own.k_proj.weight.data[head * width + width // 2 - 1, 0] = 4.0
            for head in range(own.q_proj.weight.shape[0] // width):
                own.q_proj.weight.data[head * width + width // 2 - 1, 1] = 4.0
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
            layer.input_layernorm.weight.data.fill_(1.0)
    return tiny


@pytest.mark.parametrize("detect", ["prefill", "decode"])
@pytest.mark.parametrize("lazy", [set(), {1}, {0, 3}, {0, 1, 2, 3}])
def test_planted_lazy_layers_are_found(lazy: set[int], detect: str) -> None:
    tiny = planted(lazy)
    prompt = torch.cat([torch.tensor([[3]]), torch.randint(4, 199, (1, 89))], 1)
    cache = empty(tiny.model)
    method = parse_method(f"simlayerkv:threshold=0.9,recent=20,last=8,detect={detect}")
    policies = layer_policies(method, tiny.model.shape, 24, 90)
    prefill(tiny.model, cache, prompt, policies, reserve=4)
    if detect == "decode":
        assert [layer.entries_mean for layer in cache.layers] == [90] * 4
    decode_step(tiny.model, cache, torch.tensor([7]), policies)
    found = {i for i, policy in enumerate(policies) if policy.method.name == "streaming"}
    assert found == lazy
    # Tested while reading, a lazy layer's line grows from there; else the first step is in it.
    trimmed = 25 if detect == "prefill" else 24
    assert [layer.entries_mean for layer in cache.layers] == [
        trimmed if index in lazy else 91 for index in range(4)
    ]
    decode_step(tiny.model, cache, torch.tensor([8]), policies)
    assert {i for i, policy in enumerate(policies) if policy.method.name == "streaming"} == lazy
    assert cache.layers[0].entries_mean == (trimmed + 1 if 0 in lazy else 92)


def test_specs() -> None:
    spec = "simlayerkv:threshold=0.8,recent=64+kvx:omega=8,pool=31"
    method = parse_method(spec)
    assert method == SimLayerKV(threshold=0.8, recent=64, inner=KVX(omega=8, pool=31))
    assert parse_method(method.spec) == method
    assert parse_method("simlayerkv").spec == "simlayerkv"
    for wrong, reason in (
        ("kvx+simlayerkv", "kvx holds no other: only simlayerkv and minference do"),
        ("simlayerkv+", "unknown method ''"),
        ("simlayerkv+simlayerkv+kvx", "simlayerkv holds no simlayerkv"),
        ("simlayerkv:inner=kvx", "no option 'inner'"),
        ("simlayerkv:detect=decode+kvx", "prefill with kvx"),
        ("simlayerkv:threshold=1.5", "from 0 to 1"),
    ):
        with pytest.raises(SettingError, match=reason):
            parse_method(wrong)
