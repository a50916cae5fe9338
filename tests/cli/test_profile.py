"""`kvlite profile`, and commands that settings reach by profiles and by the environment."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvlite as package
from kvlite.cli.options import as_flags
from kvlite.config.settings import OPTIONS, Settings
from tests.cli.conftest import Refused, Run, one_sentence


@pytest.fixture
def folder(data: Path) -> Path:
    """Where profiles go; it is not there yet."""
    return data.parent / "config" / "profiles"


def put(folder: Path, name: str, content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(content, encoding="utf-8")
    return folder / f"{name}.toml"


def test_what_is_given_is_saved_and_nothing_else(
    kvlite: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_BUDGET", "7")
    put(folder, "default", "min_p = 0.1")
    flags = ["--kv-bits=8", "--temperature", "0", "--stop", "END", "--stop", "\n", "--never-lossy"]
    done = kvlite("profile", "save", "mine", *flags)
    path = folder / "mine.toml"
    said = f"Saved in {path}\nUse it with --profile mine\n"
    assert (done.code, done.out, done.err) == (0, said, "")
    values = {"kv_bits": "8", "temperature": 0.0, "stop": ["END", "\n"], "never_lossy": True}
    assert tomllib.loads(path.read_text(encoding="utf-8")) == values
    shown = kvlite("config", "--profile", "mine", "--json").json()["profile"]
    assert shown == {"name": "mine", "path": str(path), "settings": values}


def test_every_setting_can_be_saved_and_given_back_as_flags(kvlite: Run) -> None:
    given: dict[str, Any] = {"seed": 1, "chunk": 5, "max_new_tokens": 6, "reasoning_budget": 7}
    given["reserve_tokens"] = 64
    settings = Settings(**given, stop=("-a", "b "), logit_bias=("5:-1.5",))
    values = {name: getattr(settings, name) for name in OPTIONS}
    assert kvlite("profile", "save", "all", *as_flags(values)).code == 0
    shown = kvlite("config", "--profile", "all", "--json").json()["profile"]
    assert shown["settings"] == {**values, "stop": ["-a", "b "], "logit_bias": ["5:-1.5"]}


def test_only_force_overwrites(kvlite: Run, refused: Refused, folder: Path) -> None:
    path = put(folder, "mine", "top_k = 1\n")
    refused(["profile", "save", "mine", "--top-k", "2"], "'mine'", path, "--force")
    assert path.read_text() == "top_k = 1\n"
    assert kvlite("profile", "save", "mine", "--top-k", "2", "--force").code == 0
    assert path.read_text() == "top_k = 2\n"


def test_a_model_is_found_from_any_folder(
    kvlite: Run, folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(name: str) -> Any:
        assert kvlite("profile", "save", "m", "--force", "--model", name).code == 0
        return tomllib.loads((folder / "m.toml").read_text())["model"]

    monkeypatch.chdir(model.parent)
    (tmp_path / "away").mkdir()
    monkeypatch.setenv("HOME", str(model.parent))
    assert saved(model.name) == saved(f"./{model.name}") == saved(f"~/{model.name}") == str(model)
    for name in ("smollm2-135m", "Qwen/Qwen3-8B", "not/there/yet"):
        assert saved(name) == name


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", ("nothing to save", "--kv-bits 8")),
        ("--top-p 2", ("--top-p 2", "between 0 and 1")),
        ("--method magic", ("'magic'", "choose from full")),
        ("--temperature warm", ("'warm'", "kvlite profile save --help")),
        ("--model n\udcff", ("model", "no text that a file can hold")),
    ],
)
def test_what_is_wrong_is_not_saved(
    refused: Refused, folder: Path, flags: str, named: tuple[str, ...]
) -> None:
    refused(["profile", "save", "mine", *flags.split()], *named)
    assert not folder.exists()


def asked(kvlite: Run, model: Path, text: Path, *flags: str) -> dict[str, Any]:
    args = ("--model", model, "--max-tokens", "2", "--json", "-q")
    return kvlite("ask", text, "What?", *args, *flags).json()


@pytest.mark.long
def test_answers_are_made_by_the_profile(
    kvlite: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--method", "snapkv:window=16", "--budget", "64", "--max-tokens", "5"]
    assert kvlite("profile", "save", "mine", *flags).code == 0
    usual = asked(kvlite, model, text)
    found = asked(kvlite, model, text, "--profile", "mine")
    assert (found["method"], found["budget"]) == ("snapkv:window=16", 64)
    assert found["generated_tokens"] == 2
    assert usual["method"] == Settings().method
    monkeypatch.setenv("KVLITE_PROFILE", "mine")
    assert asked(kvlite, model, text)["budget"] == 64
    monkeypatch.setenv("KVLITE_BUDGET", "70")
    assert asked(kvlite, model, text)["budget"] == 70
    assert asked(kvlite, model, text, "--budget", "80")["budget"] == 80
    only = asked(kvlite, model, text, "--profile", "none")
    assert (only["method"], only["budget"]) == (usual["method"], 70)


def test_what_a_profile_turns_on_a_flag_turns_off(kvlite: Run, folder: Path) -> None:
    put(folder, "default", "never_lossy = true")

    def found(*flags: str) -> Any:
        row = kvlite("config", *flags, "--json").json()["settings"]["never_lossy"]
        return row["value"], row["from"]

    assert found() == (True, "profile")
    assert found("--no-never-lossy") == (False, "flag")


def test_python_reads_neither_profiles_nor_the_environment(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "default", "method = 'full'")
    put(folder, "mine", "top_k = 3")
    monkeypatch.setenv("KVLITE_PROFILE", "mine")
    monkeypatch.setenv("KVLITE_BUDGET", "77")
    monkeypatch.setenv("KVLITE_TEMPERATURE", "nonsense")
    runner = package.load(str(model))
    for settings in (runner.settings, runner.conversation().settings):
        assert (settings.method, settings.budget, settings.top_k) == (
            Settings.method,
            Settings.budget,
            0,
        )


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("KVLITE_TEMPERATURE", "warm", ("KVLITE_TEMPERATURE 'warm'", "number")),
        ("KVLITE_TOP_P", "2", ("KVLITE_TOP_P 2.0", "between 0 and 1")),
        ("KVLITE_METHOD", "magic", ("KVLITE_METHOD: ", "'magic'", "choose from full")),
        ("KVLITE_KV_BITS", "3", ("KVLITE_KV_BITS '3'", "8, 4, 2")),
        ("KVLITE_VRAM", "lots", ("KVLITE_VRAM 'lots'", "24GiB")),
        ("KVLITE_DEVICE", "toaster", ("KVLITE_DEVICE: ", "'toaster'", "auto, cpu or cuda")),
        ("KVLITE_PROFILE", "fast", ("KVLITE_PROFILE 'fast'", "kvlite profile --help")),
        ("KVLITE_PROFILE", "a/b", ("KVLITE_PROFILE 'a/b'", "letters, digits")),
    ],
)
def test_bad_variables(
    refused: Refused,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    named: tuple[str, ...],
) -> None:
    monkeypatch.setenv(variable, value)
    refused(["ask", text, "What?"], *named)
    refused(["plan"], *named)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("top_k =", ("not readable TOML", "kvlite profile save mine --force")),
        ("top_q = 1", ("unknown setting 'top_q': did you mean top_",)),
        ("top_p = 2", ("top_p 2", "between 0 and 1")),
        ("method = 'magic'", ("method: ", "'magic'", "choose from full")),
        ("budget = 0", ("budget 0", "give more than 0")),
    ],
)
def test_bad_profiles(
    refused: Refused, text: Path, folder: Path, content: str, named: tuple[str, ...]
) -> None:
    path = put(folder, "mine", content)
    refused(["ask", text, "What?", "--profile", "mine"], path, *named)
    if "'magic'" not in named and content != "budget = 0":  # the bench takes neither from there
        refused(["bench", "memory", "--profile", "mine"], path, *named)


def test_what_does_not_fit_the_model_is_told_from_where_it_comes(
    refused: Refused, model: Path, text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(folder, "mine", "stream = 'ram'")
    ask = ["ask", text, "What?", "--device", "cpu", "--model", model]
    refused(
        [*ask, "--profile", "mine"],
        "--stream ram would",
        f"(--stream is from profile mine ({path}))",
    )
    monkeypatch.setenv("KVLITE_STREAM", "ram")
    refused(ask, "--stream ram would", "(--stream is from environment KVLITE_STREAM)")
    with pytest.raises(AssertionError):
        refused([*ask, "--stream", "ram"], "is from")


def test_a_folder_that_cannot_be_used(kvlite: Run, folder: Path) -> None:
    folder.parent.write_text("a file")
    one_sentence(kvlite("profile", "save", "mine", "--top-k", "1"), folder, "KVLITE_CONFIG")


def test_bad_names(refused: Refused, folder: Path) -> None:
    for name in ("a b", "../a", "none", "é"):
        refused(["profile", "save", name, "--top-k", "1"], repr(name), "letters, digits, - and _")
    assert not folder.exists()
