"""Heads that compete for a layer's entries, and lines that fall over layers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvlite
from kvlite.cache import LayerCache
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.base import LayerView
from kvlite.methods.budgets import LayerLine, layer_line
from kvlite.methods.kvx import KVX
from kvlite.methods.rules import Rule
from kvlite.methods.share import alike, compete
from kvlite.methods.snapkv import SnapKV
from kvlite.settings import Settings
from tests.conftest import Tiny
from tests.oracles import budgets, selection
from tests.test_methods import Case, at, make_case, selected

scores = st.lists(
    st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12), min_size=1, max_size=5
)


@given(lines=scores, total=st.integers(0, 70), sure=st.integers(0, 9))
def test_compete_equals_the_oracle(lines: list[list[float]], total: int, sure: int) -> None:
    """Heads in banks of their own, so that each may have its own number of candidates."""
    counts = compete([torch.tensor([[line]]) for line in lines], total, sure)
    assert [count for (count,) in counts] == selection.compete(lines, total, sure)


def test_a_batch_competes_by_its_mean() -> None:
    """Heads 0 and 1 win three entries each in one of two sequences; head 2 in none."""
    first = torch.tensor([[9.0, 8, 7], [1, 1, 1], [2, 2, 2]])
    second = torch.tensor([[1.0, 1, 1], [9, 8, 7], [2, 2, 2]])
    assert compete([torch.stack([first, second])], 6, 0) == [[3, 3, 0]]


def test_alike() -> None:
    assert alike([4, 2, 4, 0]) == [(0, (3,)), (2, (1,)), (4, (0, 2))]


def oracle(case: Case, method: SnapKV | KVX, budget: int) -> list[list[list[int]]]:
    first, last = method.ends(budget)
    rows = case.window.last(method.observation(budget))
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


def test_heads_in_banks_of_different_length_compete_together() -> None:
    """A second turn: what one head lacks, others may keep, and the mean is the budget again."""
    case = make_case(kv_heads=3, seed=8)
    method = SnapKV(window=4, per_head=True)
    once = Rule(method, 20).cut(LayerView(0, case.layer.banks, case.window, 20), room=0)
    assert len(once.banks) > 1 and once.entries_mean == 20
    again = Rule(method, 12).cut(LayerView(0, once.banks, case.window, 12), room=0)
    assert again.entries_mean == 12
    assert sorted(head for bank in again.banks for head in bank.heads) == [0, 1, 2]
    assert again.keys.shape[1] == 36


def lines(layer: LayerCache) -> list[int]:
    return sorted(bank.used for bank in layer.banks)


@pytest.mark.parametrize("spec", ["snapkv:window=4,per_head=true", "kvx:alpha=4,per_head=true"])
def test_ragged_lines_answer_and_free_memory(llama: Tiny, spec: str) -> None:
    talk = kvlite.Runner(llama.model, Settings()).conversation(method=spec, budget=24)
    talk.read(torch.randint(3, 199, (150,), generator=torch.Generator().manual_seed(1)).tolist())
    ragged = [layer for layer in talk.cache.layers if len(layer.banks) > 1]
    assert ragged
    assert talk.cache.entries_mean == 24
    before = [lines(layer) for layer in talk.cache.layers]
    answer = talk.generate([5], max_new_tokens=70, ignore_eos=True)
    assert len(answer.token_ids) == 70
    grown = 69 if "snapkv" in spec else 0
    assert talk.cache.entries_mean == 24 + grown
    assert [sum(lines(layer)) for layer in talk.cache.layers] == [
        sum(line) + grown * len(line) for line in before
    ]
    talk.generate([6] * 30, max_new_tokens=3, ignore_eos=True)
    assert talk.cache.entries_mean == 24 + (2 if grown else 0)
    assert sum(layer.nbytes for layer in talk.cache.layers) == talk.cache.nbytes


@pytest.mark.parametrize("option", ["middle=example", "per_layer=true"])
def test_one_vote_for_all_heads_leaves_nothing_to_compete_for(option: str) -> None:
    with pytest.raises(SettingError, match="kvx:per_head=True"):
        parse_method(f"kvx:per_head=true,{option}")


@given(
    kind=st.sampled_from(["geometric", "exponential"]),
    layers=st.integers(1, 40),
    average=st.integers(9, 300),
    beyond=st.integers(-5, 2000),
    beside=st.integers(0, 8),
    beta=st.floats(1, 40).map(lambda value: round(value, 2)),
)
def test_falling_lines_sum_and_equal_the_oracle(
    kind: LayerLine, layers: int, average: int, beyond: int, beside: int, beta: float
) -> None:
    n = average + beyond
    ours = layer_line(kind, average, layers, n, beside=beside, beta=beta)
    assert sum(ours) == average * layers
    assert ours == sorted(ours, reverse=True)
    assert min(ours) >= min(average, beside + 1)
    expected = budgets.falling_line(average, layers, n, beside, beta, kind == "exponential", 1)
    assert np.abs(np.subtract(ours, expected)).max() <= 1  # fractions that differ by float noise


def test_lines_from_flat_to_steep() -> None:
    kinds: tuple[LayerLine, ...] = ("uniform", "pyramid", "geometric", "exponential")
    firsts = [layer_line(kind, 64, 30, 4000, beside=8, beta=20)[0] for kind in kinds]
    assert firsts == sorted(firsts) and firsts[0] == 64 and firsts[1] == 8 + 109
    assert len({*firsts}) == 4
