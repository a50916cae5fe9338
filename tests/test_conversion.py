"""Conversions of GGUF files: kept whole, made anew if damaged, one at a time, ended at once."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

import kvlite.model.gguf as conversion
from kvlite.config.child_process import run_in_child
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.errors import ModelError, Stopped
from kvlite.model.gguf import RECORD, converted_folder, flaw, sweep
from kvlite.model.source import find_model
from tests.conversions import copied, endless, faults, here
from tests.test_model import write_gguf

WAIT = 60


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where conversions lie."""
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def file(tmp_path: Path, tiny_folder: Path) -> Path:
    """A GGUF file, and beside it what a conversion of it gives."""
    write_gguf(tmp_path / "a.gguf")
    shutil.copytree(tiny_folder, tmp_path / "made")
    return tmp_path / "a.gguf"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "run_in_child", here)
    monkeypatch.setattr(conversion, "_convert", copied)


def left(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir()) if models.exists() else []


# --- damaged ones --------------------------------------------------------------------------------


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def lose(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def garble(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.write(b"\0" * 100)

    return change


def without_record(then: Callable[[Path], object]) -> Callable[[Path], object]:
    """As an earlier kvlite left it."""

    def change(folder: Path) -> None:
        (folder / RECORD).unlink()
        then(folder)

    return change


DAMAGES = [
    *(cut(name) for name in ("model.safetensors", "config.json", "tokenizer.json", RECORD)),
    *(lose(name) for name in ("model.safetensors", "config.json", "tokenizer.json")),
    *(garble(name) for name in ("model.safetensors", "tokenizer.json", RECORD)),
]
OLD_DAMAGES = [
    *(cut(name) for name in ("model.safetensors", "config.json", "tokenizer.json")),
    *(lose(name) for name in ("model.safetensors", "config.json", "tokenizer_config.json")),
    garble("model.safetensors"),
]


@pytest.mark.cases(4)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("damage", [*DAMAGES, *map(without_record, OLD_DAMAGES)])
def test_a_damaged_conversion_is_made_anew(
    damage: Callable[[Path], object], file: Path, models: Path
) -> None:
    folder = converted_folder(file)
    damage(folder)
    said = list[str]()
    assert converted_folder(file, said.append) == folder
    assert len(said) == 1
    assert said[0].startswith(f"Converting a.gguf anew: of {folder}, ")
    assert flaw(folder) is None and left(models) == [folder.name]
    assert converted_folder(file, said.append) == folder and len(said) == 1


@pytest.mark.usefixtures("quick")
def test_a_whole_conversion_of_an_earlier_kvlite_is_kept(file: Path, models: Path) -> None:
    folder = converted_folder(file)
    (folder / RECORD).unlink()
    before = (folder / "model.safetensors").stat()
    said = list[str]()
    assert converted_folder(file, said.append) == folder
    assert (folder / "model.safetensors").stat() == before and said == []


def test_the_embedded_models_conversion_is_whole() -> None:
    folder = find_model(EMBEDDED_MODEL)
    said = list[str]()
    assert find_model(EMBEDDED_MODEL, said.append) == folder
    assert flaw(folder) is None and said == []


@pytest.mark.usefixtures("quick")
def test_what_killed_conversions_left_is_swept(file: Path, models: Path) -> None:
    for name in (".partial-abc", ".partial-killed"):
        (models / name).mkdir(parents=True)
        (models / name / "model.safetensors").write_bytes(b"half a gigabyte")
    folder = converted_folder(file)
    assert left(models) == [folder.name]


# --- two at once ---------------------------------------------------------------------------------


def test_what_a_killed_conversion_left_is_swept_whatever_model_is_used(models: Path) -> None:
    left_behind = models / ".partial-old"
    left_behind.mkdir(parents=True)
    (left_behind / "weights").write_bytes(b"half")
    sweep()
    assert not left_behind.exists()


def test_what_is_no_gguf_is_refused_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        converted_folder(path)


def test_a_part_of_a_model_is_no_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "x-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="one of 3 parts of a model: merge them first"):
        converted_folder(path)


def test_of_two_at_once_one_waits(
    file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, waiting = (threading.Event() for _ in range(3))
    made, found = list[Path](), list[Path]()

    def slow(gguf: Path, folder: Path) -> None:
        made.append(folder)
        begun.set()
        assert go_on.wait(WAIT)
        copied(gguf, folder)

    monkeypatch.setattr(conversion, "run_in_child", here)
    monkeypatch.setattr(conversion, "_convert", slow)
    first = threading.Thread(target=lambda: found.append(converted_folder(file)))
    first.start()
    assert begun.wait(WAIT)
    said = list[str]()

    def hear(sentence: str) -> None:
        said.append(sentence)
        waiting.set()

    second = threading.Thread(target=lambda: found.append(converted_folder(file, hear)))
    second.start()
    assert waiting.wait(WAIT)
    cancel = threading.Event()
    with pytest.raises(Stopped):
        converted_folder(file, lambda said: cancel.set(), cancel)
    go_on.set()
    first.join(WAIT)
    second.join(WAIT)
    assert found[0] == found[1] and len(made) == 1
    assert said == [f"Waiting for another kvlite, which converts a model into {models}"]


# --- ended ---------------------------------------------------------------------------------------


def test_cancel_ends_a_conversion_and_leaves_nothing(
    file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_convert", endless)
    cancel, ended = threading.Event(), list[BaseException]()

    def convert() -> None:
        try:
            converted_folder(file, cancel=cancel)
        except Stopped as stopped:
            ended.append(stopped)

    thread = threading.Thread(target=convert)
    thread.start()
    _until_begun(file)
    cancel.set()
    thread.join(WAIT)
    assert not thread.is_alive() and len(ended) == 1
    assert left(models) == []


def test_cancel_ends_the_reading_of_a_file(file: Path, models: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Stopped):
        find_model(str(file), cancel=cancel)
    assert left(models) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals there")
def test_an_interrupt_leaves_nothing_and_a_kill_what_is_swept_next(
    file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "import kvlite.model.gguf as conversion\n"
        "from tests.conversions import endless\n"
        "conversion._convert = endless\n"
        "conversion.converted_folder(Path(sys.argv[1]))"
    )
    for number, remains in ((signal.SIGINT, 0), (signal.SIGKILL, 1)):
        (file.parent / "begun").unlink(missing_ok=True)
        program = subprocess.Popen(
            [sys.executable, "-c", script, str(file)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        _until_begun(file)
        program.send_signal(number)
        program.wait(WAIT)
        assert len(left(models)) == remains
    monkeypatch.setattr(conversion, "run_in_child", here)
    monkeypatch.setattr(conversion, "_convert", copied)
    assert left(models) != [converted_folder(file).name] == left(models)


def _until_begun(file: Path) -> None:
    waited = threading.Event()
    for _ in range(WAIT * 20):
        if (file.parent / "begun").exists():
            return
        waited.wait(0.05)
    raise AssertionError("the conversion does not begin")


# --- no room, no place ---------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_what_would_not_fit_is_refused_at_once(
    file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(ModelError) as error:
        converted_folder(file)
    said = str(error.value)
    assert "a.gguf takes 64.0 MiB once it is converted" in said
    assert f"{models} has 4.9 KiB free" in said and "KVLITE_CACHE" in said
    assert left(models) == []


def rust(number: int) -> Exception:
    return RuntimeError(f"SafetensorError: Error while serializing: I/O error (os error {number})")


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        rust(errno.ENOSPC),
        rust(errno.EDQUOT),
    ],
)
def test_a_disk_that_fills_while_converting(
    failure: Exception, file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(conversion, "run_in_child", fills)
    with pytest.raises(ModelError) as error:
        converted_folder(file)
    assert f"{models} has no room for the converted model" in str(error.value)
    assert "KVLITE_CACHE" in str(error.value)
    assert left(models) == []


def test_no_memory_to_convert(file: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise MemoryError("a child process was killed (-9)")

    monkeypatch.setattr(conversion, "run_in_child", killed)
    with pytest.raises(ModelError, match=r"a\.gguf cannot be converted: there is not memory"):
        converted_folder(file)
    assert left(models) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.skipif(sys.platform == "win32", reason="no /proc there")
def test_a_place_that_can_hold_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file")
    for place in (tmp_path / "taken", tmp_path / "taken" / "below", Path("/proc/nowhere")):
        monkeypatch.setenv("KVLITE_CACHE", str(place))
        with pytest.raises(ModelError, match=r"cannot hold a converted model .*KVLITE_CACHE") as it:
            converted_folder(file)
        assert str(place) in str(it.value) and "\n" not in str(it.value)


@pytest.mark.long
def test_each_system_call_of_a_conversion_may_fail(file: Path, tmp_path: Path) -> None:
    said = run_in_child(faults, str(file), str(tmp_path / "faulty"))
    assert len(said) >= 5 * 8
    assert not [each for each in said if "LEFT" in each or "\n" in each]
    refused = [each for each in said if each not in ("", "interrupted")]
    assert all(str(tmp_path / "faulty") in each and "KVLITE_CACHE" in each for each in refused)
    # The lock finds a way around one; all others stand in the way.
    assert len(refused) >= 4 * 8 and "interrupted" in said
