"""How much each layer keeps: sums, bounds and slopes, against `oracles/budgets.py`."""

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvlite.cache import KVSize, LayerCache
from kvlite.errors import SettingError
from kvlite.methods import METHODS, Method
from kvlite.methods.allocation import Short, largest_remainder, pyramid
from kvlite.methods.budget import AUTO_LEAST, AUTO_SHARE, Budget, parse_budget
from kvlite.methods.kvx import KVX
from kvlite.methods.layer_policy import layer_policies
from kvlite.methods.pyramidkv import PyramidKV
from kvlite.methods.snapkv import SnapKV
from kvlite.methods.streaming import Streaming
from kvlite.model.shape import ModelShape
from kvlite.model.window import LocalWindow

from .oracles import budgets as oracle

LAYERS = [1, 2, 4, 30, 32, 40, 80]
BETAS = [1, 1.5, 2, 3, 7, 10, 14, 16, 18, 20, 33, 100]

quick = settings(max_examples=300, deadline=None)

# --- largest remainder ---------------------------------------------------------------------------


@st.composite
def ideals(draw: st.DrawFn) -> tuple[list[Fraction], int, int, int]:
    """Ideals with many ties, in and out of the bounds; a total that the bounds allow or exceed."""
    layers = draw(st.integers(1, 12))
    denominator = draw(st.sampled_from([1, 2, 3, 7, 10, 62, 620]))
    numerators = st.integers(-20 * denominator, 120 * denominator)
    ideal = [Fraction(draw(numerators), denominator) for _ in range(layers)]
    low = draw(st.integers(0, 20))
    high = draw(st.integers(low, 100))
    total = draw(st.integers(layers * low, layers * high + 50))
    return ideal, total, low, high


@quick
@given(ideals())
@example(([Fraction(3, 2)] * 4, 6, 0, 10))
@example(([Fraction(10), Fraction(4), Fraction(0)], 14, 1, 5))
@example(([Fraction(50), Fraction(40)], 90, 0, 7))
def test_largest_remainder_equals_the_oracle(case: tuple[list[Fraction], int, int, int]) -> None:
    ideal, total, low, high = case
    rounded = largest_remainder([float(value) for value in ideal], total, low, high)
    assert sum(rounded) == min(total, len(ideal) * high)
    assert all(low <= value <= high for value in rounded)
    assert rounded == oracle.largest_remainder(ideal, total, low, high)


@quick
@given(
    st.lists(st.floats(0, 10_000), min_size=1, max_size=40),
    st.integers(-5, 300_000),
    st.integers(0, 50),
    st.integers(0, 9000),
)
def test_largest_remainder_sums_to_the_clamped_total(
    ideal: list[float], total: int, low: int, spread: int
) -> None:
    """Of any real numbers, and of totals that the bounds do not allow."""
    layers, high = len(ideal), low + spread
    rounded = largest_remainder(ideal, total, low, high)
    assert sum(rounded) == max(layers * low, min(total, layers * high))
    assert all(low <= value <= high for value in rounded)


# --- pyramid -------------------------------------------------------------------------------------


@st.composite
def pyramids(draw: st.DrawFn) -> tuple[int, int, int, int, float]:
    """(average, layers, seen, window, beta), seen near the branches or far beyond them."""
    window = draw(st.integers(0, 64))
    chosen = draw(st.integers(1, 400))
    average = window + chosen
    seen = draw(
        st.one_of(
            st.integers(average, 2 * average + 2),
            st.integers(max(1, 2 * chosen - 2), 2 * chosen + window + 2),
            st.integers(average, 20_000),
        )
    )
    layers, beta = draw(st.sampled_from(LAYERS)), draw(st.sampled_from(BETAS))
    return average, layers, max(seen, average), window, beta


@quick
@given(pyramids(), st.sampled_from(["uniform", "reflect"]), st.integers(1, 9))
@example((128, 32, 10_000, 8, 20), "uniform", 1)
def test_exact_pyramid_sums_falls_and_equals_the_oracle(
    case: tuple[int, int, int, int, float], short: Short, least: int
) -> None:
    average, layers, seen, window, beta = case
    least = min(least, average - window)
    kept = pyramid(average, layers, seen, window=window, beta=beta, short=short, least=least)
    assert sum(kept) == layers * average
    assert kept == sorted(kept, reverse=True)
    assert all(window + least <= entries <= seen for entries in kept)
    assert kept == oracle.pyramid(
        average, window, layers, seen, beta=beta, short=short, floor=least
    )


@quick
@given(pyramids(), st.sampled_from(["uniform", "reflect"]))
def test_official_pyramid_equals_the_oracle(
    case: tuple[int, int, int, int, float], short: Short
) -> None:
    average, layers, seen, window, beta = case
    kept = pyramid(
        average, layers, seen, window=window, beta=beta, rounding="official", short=short
    )
    assert kept == oracle.pyramid(
        average, window, layers, seen, beta=beta, rounding="official", short=short
    )
    # It rounds the step down, so it spends the budget or more.
    assert sum(kept) >= layers * average
    assert kept == sorted(kept, reverse=True)


def test_pyramid_fixtures_of_128_entries_in_32_layers() -> None:
    exact = [k - 8 for k in pyramid(128, 32, 10_000, window=8, beta=20)]
    assert exact[:4] == [234, 227, 219, 212] and exact[-4:] == [28, 21, 13, 6]
    assert sum(exact) == 3840
    official = [k - 8 for k in pyramid(128, 32, 10_000, window=8, beta=20, rounding="official")]
    assert official[:4] == [234, 227, 220, 213] and official[-4:] == [38, 31, 24, 17]
    assert sum(official) == 4016


@pytest.mark.parametrize(
    ("average", "means"),
    [
        (64, (71.5, 79.0, 78.5)),
        (96, (102.5, 102.0, 101.0)),
        (128, (133.5, 144.5, 163.0)),
        (256, (259.5, 258.0, 294.5)),
        (2048, (2048.5, 2055.5, 2050.5)),
    ],
)
def test_official_pyramid_overspends_as_the_released_code(
    average: int, means: tuple[float, ...]
) -> None:
    for layers, mean in zip((32, 40, 80), means, strict=True):
        kept = pyramid(average, layers, 100_000, window=8, beta=20, rounding="official")
        assert sum(kept) / layers == mean
        assert PyramidKV(rounding="official").layer_budgets(layers, average, 100_000) == kept


# --- budgets of the methods ----------------------------------------------------------------------


@quick
@given(st.sampled_from(LAYERS), st.integers(9, 600), st.integers(1, 20_000), st.sampled_from(BETAS))
def test_pyramidkv_budgets_sum_to_the_average(
    layers: int, average: int, beyond: int, beta: float
) -> None:
    seen = average + beyond
    kept = PyramidKV(beta=beta).layer_budgets(layers, average, seen)
    assert sum(kept) == layers * average
    assert kept == oracle.pyramid(average, 8, layers, seen, beta=beta)
    reflected = PyramidKV(beta=beta, short="reflect").layer_budgets(layers, average, seen)
    assert reflected == oracle.pyramid(average, 8, layers, seen, beta=beta, short="reflect")


@quick
@given(st.sampled_from(LAYERS), st.integers(3, 600), st.integers(1, 20_000), st.sampled_from(BETAS))
def test_kvx_lines_sum_to_the_average(layers: int, average: int, beyond: int, beta: float) -> None:
    seen = average + beyond
    lines = KVX(beta=beta).layer_budgets(layers, average, seen)
    assert sum(lines) == layers * average
    assert lines == sorted(lines, reverse=True)
    assert all(3 <= line <= seen for line in lines)
    assert lines == oracle.pyramid(average, 0, layers, seen, beta=beta, floor=3)


def test_pyramidkv_that_is_told_otherwise_has_no_slope() -> None:
    assert PyramidKV(layers="uniform").layer_budgets(4, 100, 1000) == [100] * 4
    sloping = PyramidKV().layer_budgets(4, 100, 1000)
    assert sum(sloping) == 400 and sloping[0] > 100 > sloping[3]


def test_kvx_cuts_lines_of_the_example_reading_at_its_limit() -> None:
    example = KVX(middle="example", limit=300)
    assert example.layer_budgets(4, 100, 300) == example.layer_budgets(4, 100, 5000) == [300] * 4
    assert KVX(middle="example").layer_budgets(4, 100, 5000) == [100] * 4


@pytest.mark.parametrize("name", METHODS)
def test_no_layer_loses_an_entry_of_a_prompt_within_the_budget(name: str) -> None:
    method = METHODS[name]()
    for seen in (1, 5, 99, 100):
        assert all(entries >= seen for entries in method.layer_budgets(6, 100, seen))


# --- amounts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "budget_spec"),
    [
        ("512", Budget(entries=512)),
        (" 1 ", Budget(entries=1)),
        ("+7", Budget(entries=7)),
        ("512.0", Budget(entries=512)),
        (64, Budget(entries=64)),
        ("25%", Budget(share=0.25)),
        ("12.5 %", Budget(share=0.125)),
        ("100%", Budget(share=1.0)),
        ("900B", Budget(nbytes=900)),
        ("64KB", Budget(nbytes=64_000)),
        ("1.5kib", Budget(nbytes=1536)),
        ("64MiB", Budget(nbytes=64 << 20)),
        ("64 mb", Budget(nbytes=64 * 10**6)),
        ("0.5GiB", Budget(nbytes=1 << 29)),
        ("2gB", Budget(nbytes=2 * 10**9)),
        ("auto", Budget(share=1.0, auto=True)),
    ],
)
def test_amounts_that_can_be_read(text: str | int, budget_spec: Budget) -> None:
    assert parse_budget(text) == budget_spec


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0", "more than 0"),
        ("0%", "more than 0"),
        ("0.0MiB", "more than 0"),
        ("-5", "more than 0"),
        ("-5%", "more than 0"),
        (-3, "more than 0"),
        ("100.1%", "up to 100%"),
        ("1000%", "up to 100%"),
        ("", "not a budget"),
        ("many", "not a budget"),
        ("5 apples", "not a budget"),
        ("1e3", "not a budget"),
        ("1,000", "not a budget"),
        ("nan", "not a budget"),
        ("inf", "not a budget"),
        ("5K", "not a budget"),
        ("64MiBs", "not a budget"),
        ("%", "not a budget"),
        ("5iB", "unknown unit"),
        ("5TiB", "not a budget"),
        ("512.5", "whole number"),
    ],
)
def test_amounts_that_cannot_be_read(text: str | int, reason: str) -> None:
    with pytest.raises(SettingError, match=reason) as error:
        parse_budget(text)
    assert str(text) in str(error.value)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "9" * 400 + "%", "9" * 400 + "GiB"])
def test_an_absurdly_large_amount_is_an_error_for_people(text: str) -> None:
    """Not an OverflowError from somewhere inside; or it is simply taken, being a number."""
    try:
        budget_spec = parse_budget(text)
    except SettingError:
        return
    assert (budget_spec.entries or budget_spec.nbytes or 0) > 10**300


def make_shape(windows: tuple[int | None, ...], kv_heads: int = 2, head_dim: int = 8) -> ModelShape:
    return ModelShape(
        model_type="llama",
        layers=len(windows),
        heads=4 * kv_heads,
        hidden=32,
        intermediate=64,
        vocab=100,
        max_context=32_768,
        kv_sizes=(KVSize(kv_heads, head_dim),) * len(windows),
        windows=tuple(None if size is None else LocalWindow(size) for size in windows),
        parts=(),
        rotary=(True,) * len(windows),
        alike=(0,) * len(windows),
    )


def test_shares_and_entries_resolve() -> None:
    shape = make_shape((None,) * 4)
    assert Budget(entries=512).resolve(shape, SnapKV(), 100, 64, 2) == 512
    assert Budget(share=0.25).resolve(shape, SnapKV(), 1001, 64, 2) == 250
    assert Budget(share=1.0).resolve(shape, SnapKV(), 1001, 64, 2) == 1001 + 64
    assert Budget(share=0.001).resolve(shape, Streaming(sinks=0), 10, 64, 2) == 1
    # A share of a short prompt is never less than the method needs.
    assert Budget(share=0.5).resolve(shape, SnapKV(window=32), 4, 64, 2) == 33
    assert parse_budget("auto").resolve(shape, SnapKV(), 8000, 64, 2) == 8000 + 64
    floor = parse_budget("auto").floor
    assert floor.resolve(shape, SnapKV(), 100, 64, 2) == AUTO_LEAST
    assert floor.resolve(shape, SnapKV(), 160_000, 64, 2) == AUTO_SHARE * 160_000


def test_whole_percents_of_whole_numbers_are_exact() -> None:
    """29% of 100 tokens are 29 entries, whatever 0.29 * 100 is in floating point."""
    shape = make_shape((None,))
    for percent in range(1, 100):
        share = parse_budget(f"{percent}%")
        for seen in (100, 700, 4100, 32_700):
            entries = share.resolve(shape, Streaming(sinks=0), seen, 64, 2)
            assert entries == percent * seen // 100, (percent, seen)


METHODS_IN_BYTES = [
    Streaming(),
    SnapKV(window=6),
    PyramidKV(window=6),
    PyramidKV(window=6, short="reflect", beta=1),
    KVX(),
    KVX(recent=1, beta=3),
]


def allocated(
    shape: ModelShape, method: Method, average: int, seen: int, itemsize: int, longest: int = 0
) -> int:
    """Bytes of storage of all layers, filled to their budgets, and grown by an answer where
    nothing gives way to it. Nothing is really allocated."""
    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    total = 0
    for policy in layer_policies(method, shape, average, seen):
        line = min(policy.budget, seen) + longest  # less than a block
        if policy.method.decoding.bounded:
            line = min(line, policy.budget)
        layer = LayerCache(
            [(tuple(range(shape.kv_heads)), line)],
            batch=1,
            dim=shape.head_dim,
            dtype=dtype,
            device=torch.device("meta"),
            decode_rows=policy.method.decoding.rows,
        )
        total += layer.nbytes
    return total


@settings(max_examples=100, deadline=None)
@given(
    method=st.sampled_from(METHODS_IN_BYTES),
    windows=st.lists(st.sampled_from([None, None, 16, 128]), min_size=1, max_size=8),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 64]),
    nbytes=st.integers(1_000, 3_000_000),
    seen=st.integers(1, 5000),
    itemsize=st.sampled_from([2, 4]),
    longest=st.integers(1, 300),
)
def test_bytes_are_never_exceeded(
    method: Method,
    windows: list[int | None],
    kv_heads: int,
    head_dim: int,
    nbytes: int,
    seen: int,
    itemsize: int,
    longest: int,
) -> None:
    shape = make_shape(tuple(windows), kv_heads, head_dim)
    try:
        entries = Budget(nbytes=nbytes).resolve(shape, method, seen, longest, itemsize)
    except SettingError:
        if shape.full_layers:
            needed = min(method.min_budget, seen)
            assert allocated(shape, method, needed, seen, itemsize, longest) > nbytes
        return
    assume(entries >= method.min_budget)
    assert allocated(shape, method, entries, seen, itemsize, longest) <= nbytes
    if shape.full_layers and entries + 1 < seen:
        # And no entry that would fit is left unused.
        assert allocated(shape, method, entries + 1, seen, itemsize, longest) > nbytes


def test_rounding_that_overspends_takes_no_bytes() -> None:
    method = PyramidKV(rounding="official")
    with pytest.raises(SettingError, match="cannot be kept by pyramidkv:rounding=official"):
        Budget(nbytes=10**9).resolve(make_shape((None,)), method, 5000, 8, 2)


@pytest.mark.parametrize("method", [SnapKV(), KVX()])
@pytest.mark.parametrize("windows", [(None,) * 4, (16, None, 128, None)])
def test_bytes_that_hold_no_entry_are_refused_with_what_it_takes(
    method: Method, windows: tuple[int | None, ...]
) -> None:
    shape = make_shape(windows)
    with pytest.raises(SettingError, match="--budget 99 bytes is too little") as error:
        Budget(nbytes=99).resolve(shape, method, 5000, 0, 2)
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert least == allocated(shape, method, method.min_budget, 5000, 2)
    assert Budget(nbytes=least).resolve(shape, method, 5000, 0, 2) == method.min_budget
    with pytest.raises(SettingError):
        Budget(nbytes=least - 1).resolve(shape, method, 5000, 0, 2)
