"""Marks for answers, by hand; intervals, beside published values."""

import pytest

from kvlite.bench.intervals import mean_of, share_of
from kvlite.bench.marks import found, leading, rouge_1


@pytest.mark.parametrize(
    ("keys", "said", "share"),
    [
        (["1234567"], "It is 1234567.", 1),
        (["1234567"], "It is 1,234,567.", 0),
        (["Eat a Sandwich"], "you EAT A SANDWICH there", 1),
        (["eat a sandwich"], "eat the sandwich", 0),
        (["12", "34", "56"], "34 and 12", 2 / 3),
        (["VXKWQ"], "", 0),
    ],
)
def test_found(keys: list[str], said: str, share: float) -> None:
    assert found(keys, said) == pytest.approx(share)


@pytest.mark.parametrize(
    ("keys", "said", "share"),
    [
        (["1234567"], "1234567", 1),
        (["1234567"], "1234500", 5 / 7),
        (["1234567"], "It is 1,234,567.", 1),
        (["1234567"], "none", 0),
        (["1234567"], "9 or 12", 2 / 7),
        (["eat a sandwich"], "Eat the SANDWICH", 2 / 3),
        (["1200", "3400"], "1299, 34", 1 / 2),
    ],
)
def test_leading_digits_and_words(keys: list[str], said: str, share: float) -> None:
    assert leading(keys, said) == pytest.approx(share)


@pytest.mark.parametrize(
    ("reference", "said", "score"),
    [
        ("the cat sat", "The cat sat!", 1),
        ("the cat sat", "a dog ran", 0),
        ("the cat sat", "", 0),
        # 2 of 3 wanted, 2 of 4 said: precision 1/2, recall 2/3.
        ("the cat sat", "the cat ran away", 4 / 7),
        # A word counts as often as both have it.
        ("the the cat", "the the the the", 4 / 7),
    ],
)
def test_rouge_1(reference: str, said: str, score: float) -> None:
    assert rouge_1(reference, said) == pytest.approx(score)


@pytest.mark.parametrize(
    ("hits", "asked", "low", "high"),
    [
        # R, prop.test(correct = FALSE)
        (0, 10, 0.0, 0.2775328),
        (5, 9, 0.2666513, 0.8112222),
        (9, 9, 0.7008550, 1.0),
        (81, 263, 0.2552773, 0.3662009),
    ],
)
def test_wilson(hits: int, asked: int, low: float, high: float) -> None:
    estimate = share_of(hits, asked)
    assert (estimate.low, estimate.high) == (
        pytest.approx(low, abs=1e-4),
        pytest.approx(high, abs=1e-4),
    )


def test_means() -> None:
    # By hand: mean 3, s = sqrt(2.5), t(4) = 2.776, half = 2.776 * sqrt(2.5 / 5) = 1.963.
    estimate = mean_of([1, 2, 3, 4, 5])
    assert estimate.value == 3
    assert estimate.low == pytest.approx(3 - 1.963, abs=1e-3)
    assert estimate.high == pytest.approx(3 + 1.963, abs=1e-3)
    assert estimate.shown(1) == "3.0 (1.0 to 5.0)"
    one = mean_of([0.25])
    assert (one.value, one.low, one.shown()) == (0.25, None, "0.25")
    # t(99) = 1.9842 and t(40) = 2.0211.
    for count, student in ((100, 1.9842), (41, 2.0211)):
        values = [0.0, 1.0] * (count // 2) + [0.5] * (count % 2)
        many = mean_of(values)
        assert many.high is not None
        deviation = sum((v - 0.5) ** 2 for v in values) / (count - 1)
        assert many.high - 0.5 == pytest.approx(student * (deviation / count) ** 0.5, rel=2e-3)
