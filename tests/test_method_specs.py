"""A method is read from what it writes; what is wrong with a specification is named."""

import re
from typing import get_args, get_type_hints

import pytest

from kvlite.errors import SettingError
from kvlite.methods import METHODS, Method, parse_method
from kvlite.methods.budget import require_budget
from kvlite.methods.kvx import KVX
from kvlite.methods.pyramidkv import PyramidKV
from kvlite.methods.random import Random
from kvlite.methods.snapkv import SnapKV
from kvlite.methods.streaming import Streaming


@pytest.mark.parametrize("name", METHODS)
def test_a_method_introduces_itself(name: str) -> None:
    kind = METHODS[name]
    assert kind.name == name
    for text in ("name", "summary", "paper"):
        assert vars(kind)[text].strip()
    assert vars(kind)["__doc__"] and not kind.__doc__.startswith(f"{kind.__name__}(")  # type: ignore[union-attr]
    assert parse_method(name) == kind()
    assert kind().spec == name


def other_values(kind: type[Method]) -> list[Method]:
    """The method with each option in turn set to something else than its default."""
    hints = get_type_hints(kind)
    methods = []
    for option, default in kind.defaults().items():
        hint = hints[option]
        choices: tuple[object, ...] = (0.5,) if float in get_args(hint) else get_args(hint)
        if not choices:
            assert isinstance(default, (bool, int, float))
            changed = {bool: not default, int: default + 2, float: default / 2 or 0.25}
            choices = (changed[hint],)
        alone: dict[str, object] = {}
        if hasattr(kind, "groups"):
            alone = {"layers": "uniform"} if option in ("groups", "low") else {"groups": 1}
        if option == "low":
            alone["groups"] = 2
        if option == "drop":
            alone["layers"] = "rank"
        methods += [kind(**{**alone, option: value}) for value in choices if value != default]
    return methods


@pytest.mark.parametrize("name", METHODS)
def test_a_method_can_be_read_from_what_it_writes(name: str) -> None:
    methods = other_values(METHODS[name])
    assert len({method.spec for method in methods}) == len(methods) >= len(METHODS[name].defaults())
    for method in methods:
        again = parse_method(method.spec)
        assert again == method and type(again) is type(method)
        assert [type(value) for value in vars(again).values()] == [
            type(value) for value in vars(method).values()
        ]


def test_parse_method_takes_several_options() -> None:
    assert parse_method(" kvx:omega=8,pool=31,until_limit=true,beta=2.5 ") == KVX(
        omega=8, pool=31, until_limit=True, beta=2.5
    )
    assert parse_method("kvx:") == KVX()


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("", ["''", "snapkv"]),
        ("snapkw", ["'snapkw'", "snapkv"]),
        ("SnapKV", ["'SnapKV'", "snapkv"]),
        ("snapkv:width=3", ["'width'", "window", "pooling"]),
        ("full:window=3", ["'window'", "none"]),
        ("snapkv:spec=3", ["'spec'"]),
        ("snapkv:window=many", ["snapkv:window", "'many'"]),
        ("snapkv:window=", ["snapkv:window", "''"]),
        ("snapkv:window", ["snapkv:window", "''"]),
        ("snapkv:window=8.5", ["snapkv:window", "'8.5'"]),
        ("kvx:beta=inf", ["kvx:beta", "'inf'", "not a number"]),
        ("kvx:beta=nan", ["kvx:beta", "'nan'", "not a number"]),
        ("kvx:beta=steep", ["kvx:beta", "'steep'"]),
        ("snapkv:pooling=min", ["snapkv:pooling", "'min'", "max", "avg"]),
        ("kvx:middle=", ["kvx:middle", "''", "budget", "example"]),
        ("kvx:queries=median", ["kvx:queries", "'median'", "sum", "mean", "max"]),
        ("kvx:until_limit=yes", ["kvx:until_limit", "'yes'"]),
        ("streaming:sinks=-1", ["streaming:sinks", "-1"]),
        ("random:window=0", ["random:window", "0"]),
        (f"random:seed={10**20}", ["random:seed", f"{10**20}"]),
        ("snapkv:window=0", ["snapkv:window", "0"]),
        ("snapkv:pool=0", ["snapkv:pool", "0"]),
        ("snapkv:pool=-3", ["snapkv:pool", "-3"]),
        ("snapkv:pool=8", ["snapkv:pool", "8", "odd"]),
        ("pyramidkv:pool=2", ["pyramidkv:pool", "2", "odd"]),
        ("pyramidkv:window=-8", ["pyramidkv:window", "-8"]),
        ("pyramidkv:beta=0.9", ["pyramidkv:beta", "0.9"]),
        ("pyramidkv:beta=nan", ["pyramidkv:beta", "nan"]),
        ("pyramidkv:least=-1", ["pyramidkv:least", "-1"]),
        ("kvx:omega=0", ["kvx:omega", "0"]),
        ("kvx:limit=-1", ["kvx:limit", "-1"]),
        ("kvx:alpha=-1", ["kvx:alpha", "-1"]),
        ("kvx:beta=0", ["kvx:beta", "0"]),
        ("kvx:recent=0", ["kvx:recent", "0"]),
        ("kvx:pool=30", ["kvx:pool", "30", "odd"]),
        ("kvx:omega=8,pool=30", ["kvx:pool", "30"]),
    ],
)
def test_parse_method_names_what_is_wrong(spec: str, names: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        parse_method(spec)
    for name in names:
        # As a word: "30" must not pass for "3".
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error.value)), error.value


@pytest.mark.parametrize(
    ("method", "least"),
    [
        (Streaming(), 5),
        (Streaming(sinks=0), 1),
        (Random(window=6), 7),
        (SnapKV(window=6), 7),
        (PyramidKV(window=8), 9),
        (KVX(), 3),
    ],
)
def test_a_budget_too_small_is_refused(method: Method, least: int) -> None:
    require_budget(method, least)
    with pytest.raises(SettingError, match=rf"budget of {least - 1} .*at least {least}\b"):
        require_budget(method, least - 1)
