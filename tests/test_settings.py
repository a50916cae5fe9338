"""Settings: each option explained once, checked when made; budgets and methods read from text."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from kvlite.methods import METHODS, parse_method
from kvlite.methods.budget import Budget, method_and_budget, parse_budget

OPTIONS = {option.name: option for option in dataclasses.fields(Settings)}
NOTHING = ("seed", "chunk", "max_new_tokens", "reserve_tokens", "reasoning_budget")
BOUNDED = [name for name, option in OPTIONS.items() if option.metadata["low"] is not None]
INTEGERS = [name for name in BOUNDED if OPTIONS[name].type is not float]


def flag(name: str) -> str:
    return OPTIONS[name].metadata["flag"] or "--" + name.replace("_", "-")


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_explained_and_its_default_is_allowed(name: str) -> None:
    about, default = OPTIONS[name].metadata, OPTIONS[name].default
    assert len(about["help"]) > 10 and not about["help"].endswith(".")
    assert about["panel"] in ("Model and memory", "Answer")
    assert [flag(each) for each in OPTIONS].count(flag(name)) == 1 and flag(name).startswith("--")
    assert getattr(Settings(), name) == default == getattr(Settings(**{name: default}), name)
    assert default is not None or name in NOTHING


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_are_enforced_at_both_ends(name: str) -> None:
    about = OPTIONS[name].metadata
    low, high = about["low"], about["high"]
    limits = f"at least {low}" if high is None else f"between {low} and {high}"
    allowed, refused = [low, 10**6 if high is None else high], [low - 1, -(10**30), "1", [1]]
    refused += [] if high is None else [high + 1]
    refused += [2.5, 2.0] if name in INTEGERS else [float("nan"), float("inf"), low - 1e-9]
    refused += [] if name in NOTHING else [None]
    for value in allowed:
        made = getattr(Settings(**{name: value}), name)
        # transformers refuses a temperature of 1, and takes one of 1.0.
        assert (made, type(made)) == (value, int if name in INTEGERS else float)
    for value in refused:
        said = f"{flag(name)} {value!r} is out of range: it must be {limits}"
        with pytest.raises(SettingError, match=f"^{re.escape(said)}"):
            Settings(**{name: value})


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name].metadata["choices"]])
def test_choices_are_enforced(name: str) -> None:
    choices = OPTIONS[name].metadata["choices"]
    for value in choices:
        assert getattr(Settings(**{name: value}), name) == value
    for value in ("nonsense", "", None, choices):
        with pytest.raises(SettingError, match=f"{flag(name)} .* is not one of {choices[0]}, "):
            Settings(**{name: value})


def test_texts_may_be_given_as_what_they_stand_for() -> None:
    assert Settings(budget=512).budget == "512"  # type: ignore[arg-type]
    assert Settings(model=Path("a") / "b").model == str(Path("a/b"))  # type: ignore[arg-type]
    for name in ("model", "method", "budget", "device"):
        with pytest.raises(SettingError, match=f"--{name} None is not text"):
            Settings(**{name: None})


def test_one_stop_text_is_not_taken_for_its_letters() -> None:
    given: list[tuple[Any, tuple[str, ...]]] = [
        ("END", ("END",)),
        (["a", "b"], ("a", "b")),
        ([], ()),
    ]
    for stop, expected in given:
        assert Settings(stop=stop).stop == expected
    wrong: list[Any] = [None, 3, ["a", 3], {"a": 1}]
    for stop in wrong:
        with pytest.raises(SettingError, match=r"--stop .* is not text"):
            Settings(stop=stop)


def test_replace_changes_only_what_it_names() -> None:
    before = Settings(top_k=5)
    after = before.replace({"temperature": 0.5, "method": "full"})
    assert (after.temperature, after.method, after.top_k) == (0.5, "full", 5)
    assert before == Settings(top_k=5)
    assert before.replace({}) == before
    with pytest.raises(SettingError, match="out of range"):
        before.replace({"temperature": 11})


def test_an_unknown_name_is_an_error_that_names_the_nearest_or_the_known_ones() -> None:
    nearest = r"unknown setting 'max_tokens': did you mean max_new_tokens\?"
    with pytest.raises(SettingError, match=nearest):
        Settings().replace({"max_tokens": 5})
    with pytest.raises(SettingError, match="unknown setting 'volume': there is ") as error:
        Settings().replace({"volume": 5})
    assert all(name in str(error.value) for name in OPTIONS)


# --- budgets and methods from text ---------------------------------------------------------------

UNITS = {"B": 1, "kB": 1000, "MB": 10**6, "GB": 10**9, "KiB": 1024, "MiB": 1 << 20, "GiB": 1 << 30}


@given(st.integers(64, 10**9), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_budget_means_the_same_however_it_is_written(n: int, unit: str, space: str) -> None:
    assert parse_budget(n) == parse_budget(f"{n}.0") == parse_budget(f" {n} ") == Budget(entries=n)
    expected = Budget(nbytes=n * UNITS[unit])
    for text in (f"{n}{space}{unit}", f"{n}.0{unit.lower()}", f"+{n}{unit.upper()}"):
        assert parse_budget(text) == expected
    half = parse_budget(f"{n}.5{unit}").nbytes
    assert half is not None and abs(half - (n + 0.5) * UNITS[unit]) < 1


@given(st.integers(1, 10_000))
def test_a_share_is_a_part_of_one(hundredths: int) -> None:
    share = parse_budget(f"{hundredths / 100}%").share
    assert share == pytest.approx(hundredths / 10_000) and 0 < share <= 1


def options_of(method: str) -> st.SearchStrategy[dict[str, Any]]:
    """Values in range for any of a method's options, several at once."""
    odd = st.integers(0, 40).map(lambda n: 2 * n + 1)
    kinds: dict[Any, Any] = {bool: st.booleans(), int: odd}
    kinds[float] = st.floats(0, 1) | st.floats(1, 1e9)
    hints = get_type_hints(METHODS[method])
    kinds[float | Literal["auto"]] = st.floats(0, 1) | st.just("auto")
    choices = {
        name: kinds[hint] if hint in kinds else st.sampled_from(get_args(hint))
        for name, hint in hints.items()
        if name in METHODS[method].defaults()
    }
    return st.fixed_dictionaries({}, optional=choices)


@settings(max_examples=300)
@given(name=st.sampled_from(sorted(METHODS)), data=st.data())
def test_a_method_with_any_options_can_be_written_and_read(name: str, data: st.DataObject) -> None:
    options = data.draw(options_of(name))
    text = ",".join(f"{option}={value}".lower() for option, value in options.items())
    try:
        method = METHODS[name](**options)
    except SettingError:  # options that exclude each other are refused as text, too
        with pytest.raises(SettingError):
            parse_method(f"{name}:{text}" if text else name)
        return
    again = parse_method(method.spec)
    assert again == method and again.spec == method.spec


def test_the_defaults_fit_each_other() -> None:
    method_and_budget(Settings().method, Settings().budget)


def test_the_default_method_can_be_spelled_as_versions_before_it_had_a_name() -> None:
    assert parse_method(Settings.method).spec == Settings.method
    options = "decode=grow,pool=31,layers=uniform,queries=max,heads=max,omega=16,alpha=32"
    assert parse_method(f"kvx:{options}") == parse_method("spans")
    held = parse_method(f"simlayerkv:threshold=0.5+kvx:{options}")
    assert held.spec == "simlayerkv:threshold=0.5+spans"
    other = parse_method(f"kvx:{options},limit=3")
    assert other.spec.startswith("kvx:") and "limit=3" in other.spec
