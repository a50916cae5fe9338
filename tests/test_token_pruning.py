"""Methods that leave tokens behind between layers, beside dense forwards under masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import SettingError
from kvlite.methods import Method, parse_method
from kvlite.methods.layer_policy import layer_policies
from tests.conftest import Tiny, made_up_calibration, make_tiny
from tests.masked import run_under
from tests.oracles import rank as oracle
from tests.test_engine import empty, positions

N = 150


def fitted(spec: str, tiny: Tiny, context: int = N) -> Method:
    """The method for a model of which groups of layers are given ever fewer tokens."""
    calibration = replace(made_up_calibration(tiny.model.shape), max_context=context)
    return parse_method(spec).fitted(tiny.model.shape, calibration)


def dense(tiny: Tiny, ids: Tensor, reached: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """A forward in which layer l shows only the tokens that reached it; logits and weights. A row
    that did not reach it sees itself, so that it stays a number, and nobody looks at it."""
    count = ids.shape[1]
    allowed = {}
    for layer, tokens in enumerate(reached):
        mask = torch.zeros(count, count, dtype=torch.bool)
        mask[:, tokens] = True
        mask |= torch.eye(count, dtype=torch.bool)
        allowed[layer] = mask.tril().repeat(tiny.model.shape.kv_heads, 1, 1)
    return run_under(tiny.reference, ids, allowed)


def oracle_reached(
    tiny: Tiny, ids: Tensor, widths: list[int], rows: int, weight: float, sinks: int
) -> list[list[int]]:
    """Layer by layer, by the attention that a dense forward pays under what is known so far."""
    count = ids.shape[1]
    reached = [list(range(count))]
    for width in widths[1:]:
        before = reached[-1]
        if width >= len(before):
            reached.append(before)
            continue
        layers = [*reached, *[before] * (len(widths) - len(reached))]
        weights = dense(tiny, ids, layers)[1][len(reached) - 1][:, before][:, :, before]
        votes = np.linspace(1, weight, rows)
        chosen = oracle.going(weights.numpy(), rows, width, rows, votes, sinks)
        reached.append([before[token] for token in chosen])
    return reached


@pytest.mark.parametrize("chunk", [16, 1000])
@pytest.mark.parametrize(
    ("spec", "rows", "weight", "sinks", "widths"),
    [
        ("pyramidinfer:ratio=0.5,least=4", 31, 1.2, 4, [150, 150, 141, 113]),
        (
            "pyramidinfer:ratio=0.5,schedule=constant,least=40,recent=0",
            1,
            1.2,
            4,
            [150, 75, 75, 75],
        ),
        ("uncomp:stage=true,least=40", 8, 1.0, 0, [150, 95, 95, 40]),
    ],
)
def test_reading_equals_dense_attention_to_what_reached_each_layer(
    spec: str, rows: int, weight: float, sinks: int, widths: list[int], chunk: int
) -> None:
    tiny = make_tiny("llama")
    torch.manual_seed(5)
    ids = torch.randint(3, 199, (1, N))
    method, cache = fitted(spec, tiny), empty(tiny.model)
    pruning = method.prefilling.pruning
    assert pruning is not None and pruning.token_budgets(4, N, N) == widths
    policies = layer_policies(method, tiny.model.shape, 18, N)
    policies = [replace(policy, budget=N + 3) for policy in policies]  # so that nothing is cut, too
    logits = prefill(tiny.model, cache, ids, policies, reserve=8, chunk=chunk)
    reached = oracle_reached(tiny, ids, widths, rows, weight, sinks)
    held = [[sorted(head) for head in layer] for layer in positions(cache)]
    assert held == [[tokens, tokens] for tokens in reached]
    assert (logits[0] - dense(tiny, ids, reached)[0][-1]).abs().max() < 1e-4
    whole = ids
    for step in range(3):
        token = torch.tensor([[7 + step]])
        whole = torch.cat([whole, token], 1)
        logits = decode_step(tiny.model, cache, token[0], policies)
        later = [[*tokens, *range(N, N + step + 1)] for tokens in reached]
        assert (logits[0] - dense(tiny, whole, later)[0][-1]).abs().max() < 1e-4


def test_a_batch_goes_on_together() -> None:
    tiny = make_tiny("llama")
    torch.manual_seed(6)
    ids = torch.randint(3, 199, (3, N))
    method, cache = fitted("uncomp:stage=true,least=40", tiny), empty(tiny.model, batch=3)
    policies = layer_policies(method, tiny.model.shape, 18, N)
    prefill(tiny.model, cache, ids, [replace(policy, budget=N) for policy in policies])
    for layer in cache.layers:
        for head_group in layer.head_groups:
            lines = head_group.positions[..., : head_group.used]
            assert (lines == lines[:1, :1]).all()
    assert [layer.head_groups[0].used for layer in cache.layers] == [N, 95, 95, 40]


@pytest.mark.parametrize("spec", ["pyramidinfer:least=4", "uncomp:stage=true,least=40"])
def test_a_second_turn_reads_on_top(spec: str) -> None:
    tiny = make_tiny("llama")
    torch.manual_seed(7)
    method, cache = fitted(spec, tiny), empty(tiny.model)
    for start, count in ((0, N), (N, 100)):
        ids = torch.randint(3, 199, (1, count))
        seen = start + count
        policies = layer_policies(method, tiny.model.shape, 60, seen, new=count)
        logits = prefill(tiny.model, cache, ids, policies)
        assert torch.isfinite(logits).all() and cache.seen == seen
        for layer in positions(cache):
            for head in layer:
                assert seen - 1 in head


def test_a_model_with_sliding_windows_is_refused() -> None:
    shape = make_tiny("gemma3").model.shape
    with pytest.raises(SettingError, match="sliding windows"):
        layer_policies(parse_method("pyramidinfer"), shape, 50, N)
