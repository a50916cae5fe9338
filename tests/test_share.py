"""Heads that compete for a layer's entries, and lines that fall over layers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvlite
from kvlite.cache import LayerCache
from kvlite.config.settings import Settings
from kvlite.engine.prefill import Prefill
from kvlite.engine.slices import in_one_go
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.allocation import LayerLine, layer_line
from kvlite.methods.competition import compete
from kvlite.methods.kvx import KVX
from kvlite.methods.layer_policy import layer_policies
from kvlite.methods.snapkv import SnapKV
from tests.conftest import Tiny
from tests.oracles import budgets, selection
from tests.test_engine import empty
from tests.test_methods import Case, at, make_case, selected

scores = st.lists(
    st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12), min_size=1, max_size=5
)


@given(lines=scores, total=st.integers(0, 70), sure=st.integers(0, 9))
def test_compete_equals_the_oracle(lines: list[list[float]], total: int, sure: int) -> None:
    """Heads in head groups of their own, so that each may have its own number of candidates."""
    counts = compete([torch.tensor([[line]]) for line in lines], total, sure)
    assert [count for (count,) in counts] == selection.compete(lines, total, sure)


def test_a_batch_competes_by_its_mean() -> None:
    """Heads 0 and 1 win three entries each in one of two sequences; head 2 in none."""
    first = torch.tensor([[9.0, 8, 7], [1, 1, 1], [2, 2, 2]])
    second = torch.tensor([[1.0, 1, 1], [9, 8, 7], [2, 2, 2]])
    assert compete([torch.stack([first, second])], 6, 0) == [[3, 3, 0]]


def oracle(case: Case, method: SnapKV | KVX, budget: int) -> list[list[list[int]]]:
    first, last = method.ends(budget)
    rows = case.window.last(method.needs.num_queries(budget))
    slots = []
    for b in range(case.keys.shape[0]):
        queries, keys, _, positions, scale = case.sequence(b)
        asked = list(range(rows.start, rows.end))
        votes = selection.window_scores(
            queries[:, -len(asked) :], keys, asked, positions, scale, method.queries, method.heads
        )
        slots.append(
            selection.competing(votes, budget, first, last, method.floor, method.pool, "max")
        )
    return at(case, slots)


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 3, 5])
@pytest.mark.parametrize(
    "method",
    [
        SnapKV(window=6, per_head=True),
        SnapKV(window=4, per_head=True, pool=3, queries="max", heads="max"),
        KVX(per_head=True, alpha=4, omega=2),
    ],
    ids=["snapkv", "spans", "kvx"],
)
def test_heads_that_compete_keep_what_the_oracle_keeps(
    method: SnapKV | KVX, kv_heads: int, compressed: bool, floor: float
) -> None:
    case = make_case(kv_heads=kv_heads, compressed=compressed, seed=kv_heads)
    method = parse_method(f"{method.spec},floor={floor}")  # type: ignore[assignment]
    kept = selected(method, case, 17)
    assert kept == oracle(case, method, 17)
    lengths = [len(line) for line in kept[0]]
    assert sum(lengths) == 17 * kv_heads
    if floor < 1 and kv_heads > 1:
        assert len({*lengths}) > 1


@pytest.mark.parametrize("layers", ["uniform", "global", "entropy"])
def test_lines_shorter_than_their_ends_stay_whole(llama: Tiny, layers: str) -> None:
    """A method with a longer window comes after one that left some heads nearly nothing."""
    talk = kvlite.Runner(llama.model, Settings()).conversation(
        method="snapkv:window=2,per_head=true,floor=0", budget=40
    )
    talk.read(torch.randint(3, 199, (150,), generator=torch.Generator().manual_seed(1)).tolist())
    shortest = min(
        head_group.used for layer in talk.cache.layers for head_group in layer.head_groups
    )
    assert shortest + 5 < 30
    method = f"snapkv:window=30,per_head=true,layers={layers}"
    answer = talk.generate([5, 6, 7], method=method, budget=36, max_new_tokens=6, ignore_eos=True)
    assert len(answer.token_ids) == 6
    assert 20 < talk.cache.entries_mean <= 36 + 5


@pytest.mark.parametrize("option", ["middle=example", "per_layer=true"])
def test_one_vote_for_all_heads_leaves_nothing_to_compete_for(option: str) -> None:
    with pytest.raises(SettingError, match="kvx:per_head=True"):
        parse_method(f"kvx:per_head=true,{option}")


@given(
    kind=st.sampled_from(["geometric", "exponential"]),
    layers=st.integers(1, 40),
    average=st.integers(9, 300),
    beyond=st.integers(-5, 2000),
    reserved=st.integers(0, 8),
    beta=st.floats(1, 40).map(lambda value: round(value, 2)),
)
def test_falling_lines_sum_and_equal_the_oracle(
    kind: LayerLine, layers: int, average: int, beyond: int, reserved: int, beta: float
) -> None:
    n = average + beyond
    ours = layer_line(kind, average, layers, n, reserved=reserved, beta=beta)
    assert sum(ours) == average * layers
    assert ours == sorted(ours, reverse=True)
    assert min(ours) >= min(average, reserved + 1)
    expected = budgets.falling_line(average, layers, n, reserved, beta, kind == "exponential", 1)
    assert np.abs(np.subtract(ours, expected)).max() <= 1  # fractions that differ by float noise


# --- over layers, by their votes ------------------------------------------------------------------


def shared(tiny: Tiny, spec: str, budget: int = 24) -> tuple[kvlite.Conversation, list[int]]:
    talk = kvlite.Runner(tiny.model, Settings()).conversation(method=spec, budget=budget)
    talk.read(torch.randint(3, 199, (150,), generator=torch.Generator().manual_seed(1)).tolist())
    return talk, [sum(h * n for h, n in layer.lengths) for layer in talk.cache.layers]


@pytest.mark.parametrize("floor", [0.0, 0.5])
@pytest.mark.parametrize("method", ["snapkv:window=4", "kvx:alpha=4", "h2o:recent=4"])
def test_a_global_budget_keeps_the_best_of_all_layers(
    llama: Tiny, method: str, floor: float
) -> None:
    """Against the same layers provided with their votes, shared out by the naive oracle."""
    spec = f"{method}{',' if ':' in method else ':'}layers=global,floor={floor}"
    talk, _ = shared(llama, spec)
    assert talk.cache.entries_mean == 24
    first, last = parse_method(spec).ends(24)  # type: ignore[attr-defined]
    lines = []
    for layer in provisions(llama, spec):
        for head_group in layer.head_groups:
            assert head_group.selection_scores is not None and head_group.used == 96
            lines += head_group.selection_scores[0, :, first : 96 - last].tolist()
    chosen = 24 - first - last
    counts = selection.compete(lines, chosen * len(lines), int(floor * chosen))
    assert len({*counts}) > 1 or "h2o" in method
    expected = [count + first + last for count in counts]
    by_head = [
        {head: head_group.used for head_group in layer.head_groups for head in head_group.heads}
        for layer in talk.cache.layers
    ]
    assert [lines[head] for lines in by_head for head in sorted(lines)] == expected


def provisions(tiny: Tiny, spec: str) -> list[LayerCache]:
    """What each layer is provided with, and its votes."""
    prompt = torch.randint(3, 199, (1, 150), generator=torch.Generator().manual_seed(1))
    policies = layer_policies(parse_method(spec), tiny.model.shape, 24, 150)
    with torch.inference_mode():
        reading = Prefill(tiny.model, empty(tiny.model), prompt, policies)
        return [in_one_go(reading.compressed(index)) for index in range(len(policies))]


@pytest.mark.parametrize("per_head", ["true", "false"])
@pytest.mark.parametrize("kind", ["entropy", "gini"])
def test_layers_share_by_the_spread_of_their_votes(llama: Tiny, kind: str, per_head: str) -> None:
    spec = f"snapkv:window=4,pool=1,layers={kind},per_head={per_head}"
    talk, held = shared(llama, spec)
    assert talk.cache.entries_mean == 24
    weights = []
    for layer in provisions(llama, spec):
        of_heads = []
        for line in layer.head_groups[0].selection_scores[0, :, : 96 - 4].double().numpy():  # type: ignore[index]
            share = line / line.sum()
            if kind == "entropy":
                of_heads.append(-sum(float(p) * np.log(p) for p in share if p > 0))
            else:
                gaps = sum(abs(a - b) for a in share for b in share)
                of_heads.append(gaps / (2 * len(share)))
        weights.append(sum(of_heads) / len(of_heads))
    ideal = [20 * 4 * weight / sum(weights) for weight in weights]
    expected = budgets.largest_remainder(ideal, 80, 4, 92)
    assert [count / 2 - 4 for count in held] == expected
    if per_head == "false":
        assert all(len({n for _, n in layer.lengths}) == 1 for layer in talk.cache.layers)
