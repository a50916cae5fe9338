"""Effective rank and the groups of layers and heads made from it."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlite.methods.allocation import by_groups
from kvlite.methods.rank import (
    effective_rank,
    elbow,
    group_sizes,
    head_groups,
    layer_groups,
    spectrum,
)
from tests.oracles import rank as oracle

# Of the paper's released code: ranks by layer on Wikitext2, of a model with 32 layers and of one
# with 40. Its appendix A.2 prints the groups that they give.
CURVE_32 = [
    *(71.09, 70.85, 67.41, 69.05, 69.22, 69.52, 71.96, 73.15, 72.40, 73.33, 73.35, 73.32, 73.69),
    *(73.94, 74.62, 73.31, 73.60, 73.91, 73.91, 74.63, 74.46, 74.77, 74.94, 75.72, 74.84, 77.00),
    *(75.60, 76.24, 76.62, 75.76, 75.28, 73.45),
]
CURVE_40 = [
    *(88.561, 83.191, 84.384, 83.216, 86.922, 87.538, 89.182, 89.190, 89.953, 90.966, 91.863),
    *(92.519, 92.040, 92.465, 93.205, 91.424, 92.642, 93.008, 92.981, 93.164, 93.379, 93.116),
    *(94.167, 93.086, 92.582, 92.880, 93.111, 94.194, 94.163, 94.644, 96.268, 94.775, 95.589),
    *(95.220, 95.317, 94.193, 95.286, 92.508, 92.200, 92.141),
]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_rank_equals_the_oracle(count: int) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(2, 3, 40, 8) * torch.linspace(0.1, 2, 8) + 1
    ranks = effective_rank(spectrum(vectors), count)
    for b in range(2):
        for head in range(3):
            expected = oracle.truncated_rank(vectors[b, head].numpy(), count)
            assert float(ranks[b, head]) == pytest.approx(expected, rel=1e-9)


def test_equal_vectors_have_no_direction_and_rank_one() -> None:
    same = torch.full((20, 4), 0.1)
    assert spectrum(same).tolist() == [0, 0, 0, 0]
    assert float(effective_rank(spectrum(same), 4)) == 1


def test_the_elbow_is_where_the_curve_turns() -> None:
    assert elbow(torch.tensor([8.0, 6.0, 4.0, 1.0, 0.9, 0.8, 0.7, 0.6])) == 3
    assert elbow(torch.tensor([1.0])) == 1


def test_layer_groups_of_the_papers_own_curves() -> None:
    small, large = layer_groups(CURVE_32, 1.0), layer_groups(CURVE_40, 1.0)
    assert _spans(small) == [(0, 1), (2, 14), (15, 25), (26, 30), (31, 31)]
    assert _spans(large) == [
        *((0, 0), (1, 2), (3, 14), (15, 22), (23, 30), (31, 34), (35, 36)),
        (37, 39),
    ]


def _spans(groups: list[int]) -> list[tuple[int, int]]:
    layers = range(len(groups))
    return [
        (min(own), max(own))
        for group in range(max(groups) + 1)
        if (own := [i for i in layers if groups[i] == group])
    ]


def test_head_groups_are_equal_parts_by_rank() -> None:
    assert head_groups([2, 0, 3, 1], 2) == [0, 1, 0, 1]
    assert head_groups([1, 0, 2], 2) == [0, 0, 1]
    assert head_groups([1, 0, 2], 5) == [1, 0, 2]
    counts = [head_groups(list(range(32)), 5).count(group) for group in range(5)]
    assert sorted(counts) == [6, 6, 6, 7, 7]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (2, [512, 256]),
        (4, [512, 426, 341, 256]),
        (5, [512, 448, 384, 320, 256]),
    ],
)
def test_sizes_of_the_paper_rounded_down(groups: int, expected: list[int]) -> None:
    heads = [group for group in range(groups) for _ in range(4)]
    assert sorted(set(group_sizes(heads, 384, None, 9)), reverse=True) == expected
    assert group_sizes([0] * 4, 384, None, 9) == [384] * 4


@pytest.mark.long
@given(
    st.lists(st.integers(1, 8), min_size=2, max_size=6),
    st.integers(18, 5000),
    st.none() | st.integers(1, 600),
    st.integers(1, 40),
)
def test_sizes_equal_the_oracle_and_keep_to_the_mean(
    heads_in_group: list[int], average: int, low: int | None, floor: int
) -> None:
    groups = [group for group, count in enumerate(heads_in_group) for _ in range(count)]
    found = group_sizes(groups, average, low, floor)
    assert min(found) >= min(floor, average)
    half = oracle.sizes(heads_in_group, average, None)[-1]
    if low is None and half >= floor:
        least = None
    else:
        least = min(max(half if low is None else low, floor), average)
    for size, expected in zip(
        [found[groups.index(group)] for group in range(len(heads_in_group))],
        oracle.sizes(heads_in_group, average, least),
        strict=True,
    ):
        assert math.floor(expected - 1e-4) <= size <= expected + 1e-4
    assert average - 1 <= np.mean(found) <= average


@given(
    st.lists(st.booleans(), min_size=1, max_size=39),
    st.integers(20, 2000),
    st.integers(21, 9000),
    st.floats(1, 40),
)
def test_budgets_by_layer_groups_sum_exactly_and_fall(
    drops: list[bool], average: int, seen: int, beta: float
) -> None:
    groups = [0]
    for drop in drops:
        groups.append(groups[-1] + drop)
    budgets = by_groups(groups, average, seen, reserved=8, beta=beta, least=2)
    assert sum(budgets) == average * len(groups)
    if seen > average:
        assert max(budgets) <= max(seen, average) and min(budgets) >= 10
    firsts = [
        [size for size, own in zip(budgets, groups, strict=True) if own == group]
        for group in range(max(groups) + 1)
    ]
    for higher, lower in pairwise(firsts):
        assert min(higher) >= max(lower) - 1
