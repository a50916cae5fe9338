"""What users write, thrown at every place that reads it: one sentence, or it is taken."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvlite.cli.chat.typed import number, option_named, value_typed
from kvlite.cli.main import main
from kvlite.config.environment import read_text, unknown_variables, variable_of
from kvlite.config.profiles import Profiles
from kvlite.config.settings import OPTIONS, Settings, checked, flag_of
from kvlite.config.units import parse_bytes, size_or_auto
from kvlite.conversation.library import a_name
from kvlite.errors import LONGEST, KvliteError
from kvlite.methods import METHODS, parse_method
from kvlite.methods.budget import method_and_budget, parse_budget, require_budget
from kvlite.methods.engine_config import require_meaning, require_meanings

many = settings(
    max_examples=60,
    deadline=5000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# What parsers trip over: numbers in other scripts, signs, infinities, nesting, long texts.
_PARTS = st.sampled_from(
    [
        *METHODS,
        *(f"{name}:{option}" for name, kind in METHODS.items() for option in kind.defaults()),
        *("=", ",", "+", ":", "-", "%", ".", "_", " ", "e", "\0", "\n", "\x1b[31m", "\ud800", "["),
        *("0", "1", "-1", "512", "25%", "1e400", "nan", "inf", "0x10", "1_000", "\u0663", "\u00b2"),
        *("MiB", "B", "GB", "auto", "off", "none", "true", "k8v4", "kivi4", "g32", "cuda:1", "cpu"),
        *(
            "9" * 5000,
            "x" * 100_000,
            "simlayerkv+" * 999,
            "[" * 5000,
            '"',
            "'",
            "\\",
            "#",
            "\ufeff",
        ),
    ]
)
written = st.one_of(st.lists(_PARTS, max_size=6).map("".join), st.text(max_size=40))
values = st.one_of(
    written,
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(max_size=4),
    st.lists(st.one_of(written, st.integers()), max_size=3),
    st.just(10**5000),
    st.just(Path("a/b")),
)
names = st.sampled_from(sorted(OPTIONS))


def taken(work: Callable[[], object]) -> bool:
    """Whether something was taken; if not, it was refused in one line that is not long."""
    try:
        work()
    except KvliteError as error:
        said = str(error)
        assert 10 < len(said) <= LONGEST + 3 and said.isprintable(), said
        return False
    return True


@many
@example("simlayerkv+" * 1000 + "kvx")
@example("kvx:omega=1,omega=2")
@example("random:seed=9223372036854775808")
@given(written)
def test_methods(text: str) -> None:
    if taken(lambda: parse_method(text)):
        method = parse_method(text)
        assert parse_method(method.spec) == method
        taken(lambda: require_budget(method, 100))
        assert len(method.spec) > 2


@many
@given(written, written)
def test_budgets(method: str, budget: str) -> None:
    taken(lambda: parse_budget(budget))
    taken(lambda: method_and_budget("kvx", budget))
    taken(lambda: method_and_budget(method, budget))


@many
@given(written)
def test_sizes(text: str) -> None:
    size = parse_bytes(text)
    assert size is None or size >= 0
    taken(lambda: size_or_auto("--vram", text, "24GiB", least=1))
    taken(lambda: a_name(text))
    taken(lambda: number(text))


@many
@example("top_k", 10**5000)
@given(names, values)
def test_settings(name: str, value: object) -> None:
    if taken(lambda: checked(name, value, flag_of(name))):
        found = checked(name, value, flag_of(name))
        assert checked(name, found, flag_of(name)) == found
        taken(lambda: require_meaning(name, found, f"KVLITE_{name.upper()}"))
        taken(lambda: require_meanings(Settings().replace({name: value})))
    taken(lambda: Settings().after_load({name: value}))


@many
@given(names, written)
def test_the_environment(name: str, text: str) -> None:
    taken(lambda: read_text(name, text, variable_of(name)))
    unknown_variables([f"KVLITE_{text}"])


@many
@given(st.text(max_size=30) | names, written)
def test_set_in_a_chat(name: str, text: str) -> None:
    if taken(lambda: option_named(name)):
        taken(lambda: value_typed(option_named(name), text))


@many
@given(st.one_of(st.binary(max_size=60), st.tuples(names, written).map(" = ".join)))
def test_profiles(tmp_path: Path, content: bytes | str) -> None:
    profiles = Profiles(tmp_path)
    profiles.folder.mkdir(exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    (profiles.folder / "mine.toml").write_bytes(data)
    if taken(lambda: profiles.read("mine")):
        read = profiles.read("mine")
        taken(lambda: profiles.save("again", read.values, force=True))


@settings(many, max_examples=40)
@given(
    st.lists(
        st.one_of(
            names.map(flag_of), written, st.sampled_from(["--json", "--profile", "--", "-h"])
        ),
        max_size=4,
    )
)
def test_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setenv("KVLITE_CONFIG", os.fspath(tmp_path))
        patch.setattr(sys, "argv", ["kvlite", "config", *words])
        main()
    out, err = capfd.readouterr()
    assert ended.value.code in (None, 0, 2)
    if ended.value.code == 2:
        assert out == "" and err.startswith("kvlite: ") and err.count("\n") == 1, err
        assert len(err) <= LONGEST + 20
