"""Which place decides a setting, and what is said of it: flags, environment, profile, default."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlite.config.environment import PREFIX, read_text, unknown_variables, variable_of
from kvlite.config.profiles import Profile
from kvlite.config.resolve import resolve
from kvlite.config.settings import OPTIONS, Settings, flag_of
from kvlite.errors import SettingError
from tests.settings import valid

PATH = Path("/somewhere/mine.toml")


def written(value: Any) -> str:
    """A value as somebody would write it into the environment."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


@given(name=st.sampled_from(sorted(OPTIONS)), data=st.data())
def test_the_highest_place_that_has_a_value_decides(name: str, data: st.DataObject) -> None:
    places = data.draw(st.sets(st.sampled_from(["flag", "environment", "profile"])))
    values = {place: data.draw(valid(name)) for place in places}
    others = [other for other in OPTIONS if other != name]
    other = data.draw(st.sampled_from(others))
    profile: dict[str, Any] = {other: data.draw(valid(other))}
    if "profile" in values:
        profile[name] = values["profile"]
    found = resolve(
        {name: values["flag"]} if "flag" in values else {},
        {variable_of(name): written(values["environment"])} if "environment" in values else {},
        Profile("mine", PATH, profile),
    )
    expected = [
        (values[place], f"{place} {said}")
        for place, said in (
            ("flag", flag_of(name)),
            ("environment", "KVLITE_" + name.upper()),
            ("profile", f"mine ({PATH})"),
        )
        if place in values
    ]
    expected.append((OPTIONS[name].default, "default"))
    got = getattr(found.settings, name)
    assert (got, str(found.origins[name])) == expected[0]
    assert type(got) is type(expected[0][0])
    assert getattr(found.settings, other) == profile[other]
    rest = {each: origin.kind for each, origin in found.origins.items() if each != name}
    assert rest == {**dict.fromkeys(others, "default"), other: "profile"}


def test_a_command_looks_only_at_settings_that_it_has() -> None:
    environment = {"KVLITE_MODEL": "there", "KVLITE_TOP_K": "nonsense"}
    found = resolve({}, environment, Profile("mine", PATH, {"top_p": 0.5}), ["model", "device"])
    assert found.settings == Settings(model="there")
    assert list(found.origins) == ["model", "device"]


def test_what_a_flag_overrides_is_not_read() -> None:
    with pytest.raises(SettingError, match=r"^--max-tokens 0 is out of range"):
        resolve({"max_new_tokens": 0}, {"KVLITE_MAX_NEW_TOKENS": "5"}, None)
    found = resolve({"top_k": 5}, {"KVLITE_TOP_K": "nonsense"}, None)
    assert (found.settings.top_k, found.origins["top_k"].name) == (5, "--top-k")
    with pytest.raises(SettingError, match="KVLITE_TOP_K 'nonsense' is not a whole number"):
        resolve({"top_p": 0.5}, {"KVLITE_TOP_K": "nonsense"}, None)


def test_an_empty_variable_is_as_none() -> None:
    empty = {variable_of(name): "" for name in OPTIONS}
    found = resolve({}, empty, Profile("mine", PATH, {"seed": 3}))
    assert found.settings == Settings(seed=3)
    assert found.origins["seed"].kind == "profile"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("temperature", "warm", "KVLITE_TEMPERATURE 'warm' is not a number"),
        ("temperature", "11", "KVLITE_TEMPERATURE 11.0 is out of range: it must be between 0"),
        ("max_new_tokens", "1.5", "KVLITE_MAX_NEW_TOKENS '1.5' is not a whole number"),
        ("max_new_tokens", "9" * 5000, "is not a whole number"),
        ("never_lossy", "maybe", "KVLITE_NEVER_LOSSY 'maybe' is not true or false"),
        ("weights", "int3", "KVLITE_WEIGHTS 'int3' is not one of auto, fp32"),
        ("stop", "[INST]", "KVLITE_STOP '[INST]' begins with a bracket and is no list"),
        ("stop", "[]\nmodel = 'x'", "begins with a bracket and is no list"),
        ("stop", "[" * 100_000, "begins with a bracket and is no list"),
        ("stop", "[1, 2]", "KVLITE_STOP [1, 2] is not text, or several"),
    ],
)
def test_a_bad_variable_is_called_by_its_name(name: str, text: str, said: str) -> None:
    with pytest.raises(SettingError) as error:
        read_text(name, text, variable_of(name))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("stop", "END", ("END",)),
        ("stop", '["END", "\\n\\n"]', ("END", "\n\n")),
        ("stop", ' ["[INST]"] ', ("[INST]",)),
        ("never_lossy", "TRUE", True),
        ("never_lossy", "1", True),
        ("never_lossy", "0", False),
        ("top_k", " 7 ", 7),
        ("temperature", "1", 1.0),
        ("kv_bits", "4", "4"),
    ],
)
def test_a_variable_is_read_as_its_setting_is_typed(name: str, text: str, value: Any) -> None:
    got = read_text(name, text, variable_of(name))
    assert (got, type(got)) == (value, type(value))


def test_variables_that_are_no_settings() -> None:
    given = ["KVLITE_KVBITS", "KVLITE_KV_BITS", "KVLITE_CACHE", "HOME", "KVLITE_PROFILE", PREFIX]
    assert unknown_variables(given) == [PREFIX, "KVLITE_KVBITS"]
