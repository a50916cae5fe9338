"""Profiles: written whole or not at all, read back as they were, refused with a sentence."""

import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from kvlite.config.profiles import Profiles
from kvlite.config.settings import Settings
from kvlite.errors import SettingError
from tests.settings import several


@pytest.fixture
def profiles(tmp_path: Path) -> Profiles:
    return Profiles(tmp_path)


def put(profiles: Profiles, name: str, content: str | bytes) -> Path:
    """A profile as somebody would write it by hand."""
    path = profiles.folder / f"{name}.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@given(values=several())
def test_any_settings_come_back_as_they_were_saved(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    profiles = Profiles(tmp_path_factory.mktemp("config"))
    saved = profiles.save("mine", values)
    read = profiles.read("mine")
    assert read == saved
    assert read.values == values
    assert {name: type(value) for name, value in read.values.items()} == {
        name: type(value) for name, value in values.items()
    }
    assert Settings(**read.values) == Settings(**values)
    plain = tomllib.loads(saved.path.read_text(encoding="utf-8"))
    assert plain == {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    assert [file.name for file in profiles.folder.iterdir()] == ["mine.toml"]


def test_a_profile_written_by_hand(profiles: Profiles) -> None:
    text = "\ufeff# mine\r\nbudget = 512\nkv_bits = 4\nrecall_bits = 8\ntemperature = 1\n"
    text += "stop = 'END'\n"
    put(profiles, "by-hand", text)
    values = profiles.read("by-hand").values
    assert values == {
        "budget": "512",
        "kv_bits": "4",
        "recall_bits": "8",
        "temperature": 1.0,
        "stop": ("END",),
    }
    assert type(values["temperature"]) is float


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model = ", "is not readable TOML"),
        (b"model = '\xff'", "is not readable TOML"),
        ("stop = " + "[" * 100_000, "is not readable TOML"),
        ("max_tokens = 5", "unknown setting 'max_tokens': did you mean max_new_tokens?"),
        ("[mine]\ntop_k = 1", "unknown setting 'mine'"),
        ("temperature = 11", "temperature 11 is out of range: it must be between 0 and 10"),
        ("top_k = true", "top_k True is out of range: it must be at least 0, a whole number"),
        ("budget = 2026-01-01", "budget datetime.date(2026, 1, 1) is not text"),
        ("never_lossy = 1", "never_lossy 1 is not True or False"),
        ("weights = 'int3'", "weights 'int3' is not one of auto, fp32"),
        ("stop = ['a', 1]", "stop ['a', 1] is not text, or several"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    profiles: Profiles, content: str | bytes, said: str
) -> None:
    path = put(profiles, "bad", content)
    with pytest.raises(SettingError) as error:
        profiles.read("bad")
    assert str(error.value).startswith(str(path))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes there")
def test_what_is_no_file_is_not_waited_for(profiles: Profiles) -> None:
    path = profiles.folder / "odd.toml"
    path.mkdir(parents=True)
    with pytest.raises(SettingError, match=rf"{path}.* cannot be read"):
        profiles.read("odd")
    os.mkfifo(profiles.folder / "pipe.toml")
    with pytest.raises(SettingError, match=r"pipe\.toml is not a file: remove it"):
        profiles.read("pipe")


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "é", "a\n", "-\0", "x" * 65, "none"])
def test_names_that_no_profile_can_have(profiles: Profiles, name: str) -> None:
    for use in (profiles.read, profiles.delete, lambda each: profiles.save(each, {"top_k": 1})):
        with pytest.raises(SettingError, match="up to 64 letters, digits, - and _") as error:
            use(name)
        assert repr(name) in str(error.value)
    assert not profiles.folder.exists()


def test_names_are_those_of_files_that_can_be_profiles(profiles: Profiles) -> None:
    names = ["-", "A-b_3", "_", "a", "default", "x" * 64]
    for name in names:
        profiles.save(name, {"top_k": 1})
    for file in ("a b.toml", "none.toml", "c.txt", ".toml", "a.1.part"):
        (profiles.folder / file).write_text("")
    assert profiles.names() == names
    for name in names:
        assert profiles.delete(name) == profiles.folder / f"{name}.toml"
    assert profiles.names() == []


def test_one_that_is_not_there(profiles: Profiles) -> None:
    with pytest.raises(SettingError, match=r"profile 'fast' is no profile in .*none was saved yet"):
        profiles.read("fast")
    profiles.save("slow", {"top_k": 1})
    profiles.save("exact", {"top_k": 1})
    for use in (profiles.read, profiles.delete):
        with pytest.raises(
            SettingError, match=r"'fast' is no profile in .*: saved are exact, slow"
        ):
            use("fast")


def test_only_force_overwrites(profiles: Profiles) -> None:
    profiles.save("mine", {"top_k": 1, "seed": 3})
    with pytest.raises(SettingError, match=r"'mine' is there already \(.*mine.toml\): .*--force"):
        profiles.save("mine", {"top_k": 2})
    assert profiles.read("mine").values == {"top_k": 1, "seed": 3}
    profiles.save("mine", {"top_k": 2}, force=True)
    assert profiles.read("mine").values == {"top_k": 2}


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("something")
    profiles = Profiles(file)
    assert profiles.names() == []
    with pytest.raises(SettingError, match=r"cannot be written .*KVLITE_CONFIG") as error:
        profiles.save("mine", {"top_k": 1})
    assert str(profiles.folder) in str(error.value)
    assert file.read_text() == "something"


def test_what_no_file_can_hold(profiles: Profiles) -> None:
    for values in ({"model": "n\udcff"}, {"stop": ("a", "n\udcff")}):
        with pytest.raises(SettingError, match=r"(model|stop) .*udcff.* is no text that a file"):
            profiles.save("mine", values)
    assert not profiles.folder.exists()


SAVE = """
import os, pathlib, sys
from kvlite.config.profiles import Profiles
{broken}
values = {{"top_k": 2, "stop": ("x" * 99,) * 999}}
Profiles(pathlib.Path(sys.argv[1])).save("mine", values, force=True)
"""


@pytest.mark.parametrize(
    "broken",
    [
        "os.fsync = lambda file: os._exit(9)",
        "os.fsync = lambda file: (os.truncate(file, 50_000), os._exit(9))",
        "os.replace = lambda *_: os._exit(9)",
    ],
)
def test_a_kill_in_the_middle_leaves_the_one_before(profiles: Profiles, broken: str) -> None:
    before = profiles.save("mine", {"top_k": 1})
    code = SAVE.format(broken=broken)
    done = subprocess.run([sys.executable, "-c", code, str(profiles.folder.parent)])
    assert done.returncode == 9
    assert profiles.read("mine") == before
    assert profiles.names() == ["mine"]
    profiles.save("mine", {"top_k": 3}, force=True)
    assert profiles.read("mine").values == {"top_k": 3}


def test_a_full_disk_leaves_the_one_before(profiles: Profiles) -> None:
    before = profiles.save("mine", {"top_k": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(SettingError, match=r"mine\.toml cannot be written \(File too large\)"):
            profiles.save("mine", {"stop": ("x" * 99,) * 999}, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert profiles.read("mine") == before
    assert len(list(profiles.folder.iterdir())) == 1


def test_which_profile_is_taken(profiles: Profiles) -> None:
    def name(named: str | None, **environment: str) -> str | None:
        chosen = profiles.chosen(named, environment)
        return chosen and chosen.name

    assert name(None) is name(None, KVLITE_PROFILE="") is None
    for each in ("default", "fast", "slow"):
        profiles.save(each, {"top_k": 1})
    assert name(None) == name(None, KVLITE_PROFILE="") == "default"
    assert name(None, KVLITE_PROFILE="slow") == "slow"
    assert name("fast", KVLITE_PROFILE="slow") == name("fast", KVLITE_PROFILE="nothing") == "fast"
    assert name("none") is name(None, KVLITE_PROFILE="none") is None
    assert name("none", KVLITE_PROFILE="slow") is None
    with pytest.raises(SettingError, match="KVLITE_PROFILE 'what' is no profile"):
        name(None, KVLITE_PROFILE="what")
    with pytest.raises(SettingError, match="--profile 'what' is no profile"):
        name("what", KVLITE_PROFILE="slow")
    with pytest.raises(SettingError, match="--profile '' cannot be"):
        name("")
