"""The oracles against cases worked out by hand and against published or derived fixtures."""

import math

import numpy as np
import pytest

from . import budgets, selection
from .attention import FloatArray, attention_rows, masked_attention

# --- attention -----------------------------------------------------------------------------------


def test_attention_rows_by_hand() -> None:
    # Scale 1, dot products log 1, log 2, log 5 with the only query: weights 1/8, 2/8, 5/8.
    keys = np.log([[[1.0], [2.0], [5.0]]])
    query = np.ones((1, 1, 1))
    weights = attention_rows(query, keys, [2], [[0, 1, 2]], 1.0)
    assert np.allclose(weights, [[[1 / 8, 2 / 8, 5 / 8]]])
    # The last key lies in the future of a query at position 1.
    weights = attention_rows(query, keys, [1], [[0, 1, 2]], 1.0)
    assert np.allclose(weights, [[[1 / 3, 2 / 3, 0]]])
    # Slots may have any order: only positions count.
    weights = attention_rows(query, keys, [1], [[2, 1, 0]], 1.0)
    assert np.allclose(weights, [[[0, 2 / 7, 5 / 7]]])


def test_attention_rows_scale_and_softcap() -> None:
    keys = np.array([[[2.0], [4.0]]])
    query = np.ones((1, 1, 1))
    capped = [3 * math.tanh(1.0 / 3), 3 * math.tanh(2.0 / 3)]
    expected = np.exp(capped) / np.sum(np.exp(capped))
    weights = attention_rows(query, keys, [1], [[0, 1]], 0.5, softcap=3.0)
    assert np.allclose(weights[0, 0], expected)


def test_query_heads_read_their_kv_head() -> None:
    keys = np.log([[[1.0], [3.0]], [[3.0], [1.0]]])  # two KV heads
    weights = attention_rows(np.ones((4, 1, 1)), keys, [1], [[0, 1], [0, 1]], 1.0)
    assert np.allclose(weights[0], [[1 / 4, 3 / 4]])
    assert np.allclose(weights[1], [[1 / 4, 3 / 4]])
    assert np.allclose(weights[2], [[3 / 4, 1 / 4]])
    assert np.allclose(weights[3], [[3 / 4, 1 / 4]])


def test_a_row_that_sees_nothing_is_zero() -> None:
    weights = attention_rows(np.ones((1, 1, 1)), np.ones((1, 2, 1)), [0], [[1, 2]], 1.0)
    assert not weights.any()


def test_masked_attention_by_hand() -> None:
    keys = np.log([[[1.0], [2.0], [5.0]]])
    values = np.array([[[10.0, 0.0], [0.0, 6.0], [16.0, 8.0]]])
    query = np.ones((1, 1, 1))
    full = masked_attention(query, keys, values, [2], [[0, 1, 2]], 1.0, [[0, 1, 2]])
    assert np.allclose(full, [[[10 / 8 + 10, 12 / 8 + 5]]])
    dropped = masked_attention(query, keys, values, [2], [[0, 1, 2]], 1.0, [[0, 2]])
    assert np.allclose(dropped, [[[10 / 6 + 80 / 6, 40 / 6]]])
    causal = masked_attention(query, keys, values, [1], [[0, 1, 2]], 1.0, [[0, 2]])
    assert np.allclose(causal, [[[10, 0]]])


# --- budgets -------------------------------------------------------------------------------------


def test_largest_remainder_by_hand() -> None:
    assert budgets.largest_remainder([2.5, 1.7, 0.8], 5, 0, 10) == [2, 2, 1]
    assert budgets.largest_remainder([1.5, 1.5, 1.5, 1.5], 6, 0, 10) == [2, 2, 1, 1]  # ties
    assert budgets.largest_remainder([0.3, 0.1 + 0.2, 0.2, 0.2], 1, 0, 1) == [1, 0, 0, 0]  # too
    assert budgets.largest_remainder([3.3, 2.3, 1.4], 7, 0, 9) == [3, 2, 2]


def test_largest_remainder_clamps_and_redistributes() -> None:
    # The last layer is raised by 1; the other two give up half an entry each: 4.5, 2.5 -> tie.
    assert budgets.largest_remainder([5.0, 3.0, 0.0], 8, 1, 9) == [5, 2, 1]
    # The first is cut by 4, two for each of the others.
    assert budgets.largest_remainder([8.0, 2.0, 2.0], 12, 0, 4) == [4, 4, 4]
    assert budgets.largest_remainder([9.0, 2.0, 1.0], 12, 0, 5) == [5, 4, 3]
    # Both bounds at once: the excess of 5 outweighs the missing 1 and lifts the last layer to 2.
    assert budgets.largest_remainder([10.0, 4.0, 0.0], 14, 1, 5) == [5, 5, 4]


def test_pyramid_branches() -> None:
    # C = 20, W = 4, b = 16: all below 20, uniform below 32, a pyramid from 32 on.
    assert budgets.pyramid(20, 4, 3, 19) == [19, 19, 19]
    assert budgets.pyramid(20, 4, 3, 20) == [20, 20, 20]
    assert budgets.pyramid(20, 4, 3, 31) == [20, 20, 20]
    # beta 4: top 4, bottom 28, but at n = 32 capped to 28 = n - W all the same.
    assert budgets.pyramid(20, 4, 3, 32, beta=4) == [32, 20, 8]
    # beta 16: top 1, bottom 31 -> capped to 28, top reflected to 4.
    assert budgets.pyramid(20, 4, 3, 32, beta=16) == [32, 20, 8]
    assert budgets.pyramid(20, 4, 3, 32, beta=16, rounding="official") == [32, 20, 8]
    assert budgets.pyramid(20, 4, 3, 35, beta=16) == [35, 20, 5]
    assert budgets.pyramid(20, 4, 3, 99, beta=16) == [35, 20, 5]
    # Reflected in the uniform range: bottom n - W = 20, top 12.
    assert budgets.pyramid(20, 4, 3, 24, beta=16, short="reflect") == [24, 20, 16]
    assert budgets.pyramid(20, 4, 3, 20, beta=16, short="reflect") == [20, 20, 20]


def test_pyramid_floor() -> None:
    # b = 2, beta 20: the line 3.9, 2.63, 1.37, 0.1. The top is raised to 1, each other gives 0.3:
    # 3.6, 2.33, 1.07 -> floors 3 + 2 + 1 and one entry left, to the first.
    assert budgets.pyramid(10, 8, 4, 100) == [12, 10, 9, 9]
    # A floor of b leaves nothing to slope.
    assert budgets.pyramid(10, 8, 4, 100, floor=2) == [10, 10, 10, 10]
    with pytest.raises(ValueError, match="do not fit"):
        budgets.pyramid(10, 8, 4, 100, floor=3)


@pytest.mark.parametrize("rounding", ["exact", "official"])
def test_pyramid_edges(rounding: str) -> None:
    assert budgets.pyramid(128, 8, 1, 10_000, rounding=rounding) == [128]  # type: ignore[arg-type]
    flat = budgets.pyramid(128, 8, 32, 10_000, beta=1, rounding=rounding)  # type: ignore[arg-type]
    assert flat == budgets.uniform(128, 32) == [128] * 32
    with pytest.raises(ValueError, match="beta"):
        budgets.pyramid(128, 8, 32, 10_000, beta=0.5)
    with pytest.raises(ValueError, match="window"):
        budgets.pyramid(8, 8, 32, 10_000)


def test_kvx_lines() -> None:
    # C_L = 40 / 20 = 2, C_1 = 78, no window.
    assert budgets.kvx_lines(40, 3, 1000) == [78, 40, 2]
    assert budgets.kvx_lines(40, 5, 1000, beta=4) == [70, 55, 40, 25, 10]
    assert budgets.kvx_lines(40, 3, 39) == [39, 39, 39]
    assert budgets.kvx_lines(40, 3, 79) == [40, 40, 40]
    assert sum(budgets.kvx_lines(100, 32, 1000)) == 3200


# --- selection -----------------------------------------------------------------------------------


def planted(scores: list[list[float]]) -> tuple[FloatArray, FloatArray, list[int], FloatArray]:
    """One query row that sees all slots and gives slot i a weight in proportion to scores[head][i].

    Arguments for the selectors, with scale 1: queries, keys, query_positions, key_positions.
    """
    keys = np.log(np.asarray(scores, dtype=np.float64))[:, :, None]
    heads, n, _ = keys.shape
    return np.ones((heads, 1, 1)), keys, [n - 1], np.array([range(n)] * heads)


def test_streaming() -> None:
    assert selection.streaming(10, 2, 6) == [[0, 1, 2, 3, 8, 9]] * 2
    assert selection.streaming(10, 1, 5, sinks=1) == [[0, 6, 7, 8, 9]]
    assert selection.streaming(6, 1, 6) == [[0, 1, 2, 3, 4, 5]]
    assert selection.streaming(5, 1, 6) == [[0, 1, 2, 3, 4]]
    assert selection.streaming(9, 1, 4) == [[0, 1, 2, 3]]  # no recent slot, not all of them


def test_window_scores_reduce_rows_then_heads() -> None:
    # Dot products of the two query heads (1 and 0) with the keys log 1, log 3: weights 1/4, 3/4 and
    # 1/2, 1/2. The first of the two rows, at position 0, sees slot 0 alone.
    keys = np.log([[[1.0], [3.0]]])
    queries = np.array([[[1.0], [1.0]], [[0.0], [0.0]]])

    def scores(over_queries: str, over_heads: str) -> list[float]:
        result = selection.window_scores(
            queries,
            keys,
            [0, 1],
            [[0, 1]],
            1.0,
            over_queries,  # type: ignore[arg-type]
            over_heads,  # type: ignore[arg-type]
        )
        return [float(score) for score in result[0]]

    assert scores("sum", "mean") == pytest.approx([(1.25 + 1.5) / 2, (0.75 + 0.5) / 2])
    assert scores("sum", "sum") == pytest.approx([2.75, 1.25])
    assert scores("mean", "max") == pytest.approx([0.75, 0.375])
    assert scores("max", "mean") == pytest.approx([1.0, 0.625])
    assert scores("max", "max") == pytest.approx([1.0, 0.75])


def test_pool_by_hand() -> None:
    assert selection.pool([1, 5, 2, 0, 3], 3, "max") == [5, 5, 5, 3, 3]
    assert selection.pool([1, 5, 3, 1, 8], 3, "avg") == [2, 3, 3, 4, 3]
    assert selection.pool([-1, -5], 1, "max") == [-1, -5]
    assert selection.pool([-1, -5, -2], 3, "max") == [-1, -1, -2]  # padding is not a zero
    assert selection.pool([1, 5, 2, 0], 7, "max") == [5, 5, 5, 2]  # kernel 3
    assert selection.pool([1, 5, 3, 0, 1], 9, "avg") == [9 / 5, 9 / 5, 10 / 5, 9 / 5, 4 / 5]
    assert selection.pool([3, 1], 5, "avg") == [3, 1]  # kernel 1
    assert selection.pool([], 5) == []
    with pytest.raises(ValueError, match="odd"):
        selection.pool([1, 2, 3], 2)


def test_snapkv_by_hand() -> None:
    case = planted([[1, 2, 9, 1, 1, 4, 1, 50, 1, 1], [3, 3, 3, 3, 3, 3, 3, 3, 1, 1]])
    # Window 2, two more. Without pooling slots 7 and 2; ties go to the lower index.
    assert selection.snapkv(*case, 1.0, 4, 2, kernel=1) == [[2, 7, 8, 9], [0, 1, 8, 9]]
    # Max 3: slots 6 and 7 share the 50, as far as the candidates reach; then 1, 2 and 3 the 9.
    assert selection.snapkv(*case, 1.0, 5, 2, kernel=3)[0] == [1, 6, 7, 8, 9]
    # Avg 3 times 3: 3, 12, 12, 11, 6, 6, 55, 51.
    assert selection.snapkv(*case, 1.0, 5, 2, kernel=3, kind="avg")[0] == [1, 6, 7, 8, 9]
    assert selection.snapkv(*case, 1.0, 10, 2) == [list(range(10))] * 2


def test_snapkv_pools_the_candidates_alone() -> None:
    # Slot 3 is in the window: its weight must not leak into slot 2.
    case = planted([[5, 1, 1, 90, 1]])
    assert selection.snapkv(*case, 1.0, 3, 2, kernel=3) == [[0, 3, 4]]


def test_snapkv_scores_by_the_last_window_rows() -> None:
    # The row at position 3 loves slot 1; the last row, which alone is the window, loves slot 0.
    keys = np.array([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    queries = np.array([[[0.0, 9.0], [5.0, 0.0]]])
    positions = [list(range(5))]
    assert selection.snapkv(queries, keys, [3, 4], positions, 1.0, 2, 1) == [[0, 4]]
    assert selection.snapkv(queries, keys, [3, 4], positions, 1.0, 3, 2, kernel=1) == [[1, 3, 4]]
    # Fewer rows than the window: those there are.
    last = queries[:, 1:]
    assert selection.snapkv(last, keys, [4], positions, 1.0, 3, 2, kernel=1) == [[0, 3, 4]]


def test_kvx_mask_width() -> None:
    assert selection.kvx_mask_width(2048, 4) == 256
    assert selection.kvx_mask_width(10, 16) == 1  # at least 1
    assert selection.kvx_mask_width(10, 1) == 4  # 2m + 1 must fit: 5 would not
    assert [selection.kvx_mask_width(budget, 4) for budget in (1, 2, 3)] == [0, 0, 1]


def test_kvx_budget_by_hand() -> None:
    # Budget 8, omega 2: 2 sinks, 2 streaming, the best 4 of the 8 between.
    case = planted([[9, 9, 1, 5, 2, 7, 1, 6, 1, 2, 9, 9]])
    assert selection.kvx_prefill(*case, 1.0, 8, omega=2) == [[0, 1, 3, 4, 5, 7, 10, 11]]
    # Max 3 over the middle alone: 5 5 7 7 7 6 6 2.
    assert selection.kvx_prefill(*case, 1.0, 8, omega=2, kernel=3) == [[0, 1, 4, 5, 6, 7, 10, 11]]
    assert selection.kvx_prefill(*case, 1.0, 1) == [[0]]  # no mask, the best of all, lowest first
    assert selection.kvx_prefill(*case, 1.0, 12, omega=2) == [list(range(12))]
    assert selection.kvx_prefill(*case, 1.0, 8, limit=12, omega=2) == [list(range(12))]


def test_kvx_per_layer() -> None:
    rows: list[list[float]] = [[1, 8, 1, 5, 1, 1], [1, 1, 9, 5, 1, 1]]
    assert selection.kvx_prefill(*planted(rows), 1.0, 3) == [[0, 1, 5], [0, 2, 5]]
    # Weights 8/17, 1/17, 5/17 and 1/18, 9/18, 5/18: the means are .263, .279, .286.
    assert selection.kvx_prefill(*planted(rows), 1.0, 3, per_layer=True) == [[0, 3, 5]] * 2


def test_kvx_paper_example() -> None:
    """Section 4 of "KV-X": 2048 slots, mask 1/4 -> 256 sinks, 256 streaming, top 256 between."""
    rng = np.random.default_rng(2)
    scores = rng.permutation(2048) + 1.0
    case = planted([list(scores)])
    for budget in (64, 1024):
        kept = selection.kvx_prefill(*case, 1.0, budget, omega=4, middle="example")[0]
        assert len(kept) == 768
        assert kept[:256] == list(range(256))
        assert kept[-256:] == list(range(1792, 2048))
        threshold = np.sort(scores[256:1792])[-256]
        assert kept[256:512] == [s for s in range(256, 1792) if scores[s] >= threshold]


def test_kvx_example_by_hand() -> None:
    # 12 slots, omega 2: m = 3, the best 3 of the 6 between: 5, 7, 6.
    case = planted([[9, 9, 9, 5, 2, 7, 1, 6, 1, 8, 8, 8]])
    once = [0, 1, 2, 3, 5, 7, 9, 10, 11]
    assert selection.kvx_prefill(*case, 1.0, 4, omega=2, middle="example") == [once]
    # Again: 9 slots, m = 2, and of the five between the 9 of slot 2 and the 8 of slot 9. Then 6
    # slots, m = 1, the 9 of slot 1. Then three, which fit.
    again = selection.kvx_prefill(*case, 1.0, 6, omega=2, middle="example", until_limit=True)
    assert again == [[0, 1, 2, 9, 10, 11]]
    again = selection.kvx_prefill(*case, 1.0, 4, omega=2, middle="example", until_limit=True)
    assert again == [[0, 1, 11]]
    # Three slots are 1 + 1 + 1 and shrink no more, whatever the limit.
    again = selection.kvx_prefill(*case, 1.0, 2, omega=2, middle="example", until_limit=True)
    assert again == [[0, 1, 11]]
    # omega 1: 6 + 6 slots and no middle, all stay. The limit alone decides when to act.
    everything = [list(range(12))]
    assert selection.kvx_prefill(*case, 1.0, 4, omega=1, middle="example") == everything
    assert selection.kvx_prefill(*case, 1.0, 4, limit=12, middle="example") == everything
    assert selection.kvx_prefill(*case, 1.0, 99, limit=11, omega=2, middle="example") == [once]


def test_kvx_victim_by_hand() -> None:
    # Budget 8, omega 2: m = 2 sinks (positions 0, 1), and of the old ones 1 is safe (30).
    positions = [30, 0, 12, 7, 1, 20, 15, 9]
    scores = [0.0, 0.0, 0.5, 0.3, 0.0, 0.4, 0.3, 0.9]
    assert selection.kvx_victim(positions, scores, 8, 2) == 3  # 0.3 in slot 3 before slot 6
    # omega 4: m = 1, so one sink, and nothing at the end is safe.
    assert selection.kvx_victim(positions, [0.5] * 8, 8, 4) == 0  # ties: the first slot that may go
    assert selection.kvx_victim(positions, [0.5] * 7 + [0.1], 8, 4) == 7
    assert selection.kvx_victim([5], [1.0], 1, 4) == 0
    with pytest.raises(ValueError, match="full line"):
        selection.kvx_victim(positions, scores, 9, 2)
