"""Conversion of GGUF files to safetensors, once for each content, in the user's cache folder."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

from kvlite.config.child_process import run_in_child
from kvlite.config.paths import cache_folder
from kvlite.config.units import readable
from kvlite.errors import KvliteError, ModelError, Stopped, reason, require_uncancelled
from kvlite.model.architectures import ADMITTED
from kvlite.model.files import GGUF_INDEX, stored_weights
from kvlite.model.gguf_header import read_header, require_magic
from kvlite.model.gguf_index import gguf_alone, write_index
from kvlite.model.shape import read_config, require_admitted

_GGUF_NAMES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
_FORMAT = 1
_PARTIAL, _LOCK = ".partial-", "converting.lock"
# Room for files besides the weights: the largest tokenizers have some 35 MB.
_BESIDE = 64 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
FLOAT32_LIMIT = 1 << 30
# The file with sizes and digests of the others, and how much of a large one its digest covers.
RECORD = "kvlite.json"
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14


def converted_folder(
    gguf: Path,
    notify: Callable[[str], None] | None = None,
    cancel: Event | None = None,
) -> Path:
    """The safetensors folder of a GGUF file, made on first use (about 20 s for 135M weights).

    Weights are written in float32; those of files above 1 GiB, which are not `readable_folder`'s,
    in bfloat16, which takes half. The folder is named by the file's SHA-256, so a changed file is
    converted again. It is written to a temporary folder and renamed, so it is whole or not there;
    a damaged one is made again. One process converts at a time, others wait.

    Args:
        notify: called with a sentence before a conversion, and before waiting for another.
        cancel: set to stop; nothing is left behind.

    Raises:
        ModelError: the file is not a whole GGUF, its architecture is not admitted, it cannot
            be converted, or there is no room for the result.
        Stopped: `cancel` was set.
    """
    say = notify or (lambda said: None)
    try:
        folder = _folder_of(gguf, cancel)
        if folder.is_dir() and flaw(folder) is None:
            with suppress(OSError, ModelError):
                write_index(folder, gguf)
            return folder
        header = read_header(gguf)
    except OSError as error:
        raise ModelError(
            f"{gguf} cannot be read ({error.strerror}): check it and its permissions"
        ) from None
    require_admitted(hugging_face_name(header.architecture), str(gguf))
    header.require_sizes()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent, say, cancel):
            _convert_into(folder, gguf, header.numbers, say, cancel)
    except OSError as error:
        raise _unusable(folder.parent, error) from error
    return folder


def is_large(gguf: Path) -> bool:
    """Whether a file's weights are better read where they are than converted to float32."""
    return gguf.stat().st_size >= FLOAT32_LIMIT


def readable_folder(gguf: Path, cancel: Event | None = None) -> Path | None:
    """A folder with a GGUF file's config.json, tokenizer and index, from which its weights are read
    where they are; None if they cannot be. Raises as `converted_folder`."""
    folder = described_folder(gguf, cancel)
    if gguf_alone(folder) is None:
        return None
    if not (folder / "tokenizer_config.json").is_file():
        _in_child(_write_tokenizer, gguf, folder, cancel)
    return folder


def described_folder(gguf: Path, cancel: Event | None = None) -> Path:
    """A folder with the config.json that a GGUF file's header describes, and the index of its
    weights: enough for a plan, in seconds however large the file is. Raises as `converted_folder`.
    """
    about = gguf.stat()
    folder = cache_folder() / "configs" / f"{gguf.stem}-{about.st_size}-{about.st_mtime_ns}"
    if not (folder / "config.json").is_file():
        header = read_header(gguf)
        require_admitted(hugging_face_name(header.architecture), str(gguf))
        header.require_sizes()
        _in_child(_write_config, gguf, folder, cancel)
    try:
        write_index(folder, gguf)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _in_child(
    work: Callable[[Path, Path], None], gguf: Path, folder: Path, cancel: Event | None
) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run_in_child(work, gguf, folder, cancel=cancel)
    except KvliteError:
        raise
    except OSError as error:
        raise _unusable(folder, error) from error
    except Exception as error:  # libraries fail in many ways over a stranger's file
        raise ModelError(f"{gguf} does not describe a model: {reason(error)}") from error


def _write_config(gguf: Path, folder: Path) -> None:
    """Runs in a child process."""
    from transformers import AutoConfig

    from kvlite.config.atomic_file import replaced
    from kvlite.model.load import PLACE

    config: Any = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, **PLACE)
    with replaced(folder / "config.json") as file:
        file.write(config.to_json_string().encode())


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    """Runs in a child process."""
    from transformers import AutoTokenizer

    from kvlite.model.load import PLACE

    made: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **PLACE)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder) as partial:
        made.save_pretrained(partial)
        # The one that says that all are there comes last.
        for file in sorted(Path(partial).iterdir(), key=lambda file: "config" in file.name):
            file.replace(folder / file.name)


def hugging_face_name(architecture: str) -> str:
    """transformers' name of an architecture that GGUF calls otherwise."""
    return _GGUF_NAMES.get(architecture, architecture)


def sweep() -> None:
    """Remove what killed conversions left, unless one is going on."""
    from filelock import FileLock, Timeout

    models = cache_folder() / "models"
    with suppress(OSError, Timeout):
        if not any(models.glob(f"{_PARTIAL}*")):
            return
        with FileLock(models.parent / _LOCK, timeout=0):
            _sweep(models)


def _sweep(models: Path) -> None:
    for partial in models.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def already_converted(gguf: Path) -> Path | None:
    """The safetensors folder of a GGUF file if it exists, whole or not."""
    try:
        folder = _folder_of(gguf, None)
    except OSError:
        return None
    return folder if folder.is_dir() else None


def _folder_of(gguf: Path, cancel: Event | None) -> Path:
    name = f"{gguf.stem}-{_digest(gguf, cancel)[:16]}-v{_FORMAT}"
    return cache_folder() / "models" / name


def _digest(gguf: Path, cancel: Event | None) -> str:
    digest = hashlib.sha256()
    with gguf.open("rb", buffering=0) as file:
        require_magic(file, gguf)
        file.seek(0)
        while block := file.read(8 << 20):
            require_uncancelled(cancel)
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _alone(models: Path, say: Callable[[str], None], cancel: Event | None) -> Iterator[None]:
    """Held while converting: nobody else does, and what killed conversions left is removed."""
    from filelock import FileLock, Timeout

    lock = FileLock(models.parent / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"Waiting for another kvlite, which converts a model into {models}")
        try:
            lock.acquire(cancel_check=None if cancel is None else cancel.is_set)
        except Timeout:
            raise Stopped from None
    try:
        _sweep(models)
        yield
    finally:
        lock.release()


def _convert_into(
    folder: Path, gguf: Path, numbers: int, say: Callable[[str], None], cancel: Event | None
) -> None:
    """Make the folder of a GGUF file, unless another process did so meanwhile."""
    if folder.is_dir():
        damage = flaw(folder)
        if damage is None:
            return
        say(f"Converting {gguf.name} anew: of {folder}, {damage}")
        shutil.rmtree(folder)
    else:
        say(f"Converting {gguf.name} to safetensors, once, into {folder.parent}")
    small = not is_large(gguf)
    _require_room(gguf, numbers * (4 if small else 2) + _BESIDE, folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
    try:
        try:
            run_in_child(_convert, gguf, partial, cancel=cancel)
        except KvliteError:
            raise
        except MemoryError as error:
            raise ModelError(
                f"{gguf} cannot be converted: there is not memory enough ({error}); close other "
                "programs, or take a smaller model"
            ) from error
        except Exception as error:  # libraries fail in many ways over a stranger's file
            if _is_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            if isinstance(error, OSError) and error.errno is not None:  # the system's own
                raise
            raise ModelError(f"{gguf} cannot be converted: {reason(error)}") from error
        with suppress(OSError, ModelError):
            write_index(partial, gguf)
        _record(partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another kvlite, older than the lock, finished the same conversion first.
            if not folder.is_dir():
                raise
    finally:
        with suppress(OSError):
            shutil.rmtree(partial)


def _require_room(gguf: Path, needed: int, models: Path) -> None:
    free = shutil.disk_usage(models).free
    if needed > free:
        raise ModelError(
            f"{gguf.name} takes {readable(needed)} once it is converted, and {models} has "
            f"{readable(free)} free: make room there, or name another folder (KVLITE_CACHE)"
        )


def _is_full(error: Exception) -> bool:
    """Whether a disk was full, by Python's errors or Rust's."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(f"(os error {number})" in str(error) for number in _FULL)


def _unusable(models: Path, error: OSError) -> ModelError:
    if error.errno in _FULL:
        return ModelError(
            f"{models} has no room for the converted model: make room there, or name another "
            "folder (KVLITE_CACHE)"
        )
    return ModelError(
        f"{models} cannot hold a converted model ({error.strerror or error}): check it and its "
        "permissions, or name another folder (KVLITE_CACHE)"
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Runs in a child process, whose output, such as progress bars, nobody sees."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvlite.model.load import PLACE, require_whole
    from kvlite.model.making import making_modules

    small = not is_large(gguf)
    place: dict[str, Any] = {"gguf_file": gguf.name, **PLACE}
    with making_modules():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            dtype=torch.float32 if small else torch.bfloat16,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **place,
        )
    model, found = loaded
    require_whole(found, str(gguf))
    assert model.config.model_type in ADMITTED
    # transformers refuses to save what it believes is still quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _record(folder: Path) -> None:
    """Write sizes and digests of a conversion's files beside them."""
    files = (file for file in sorted(folder.iterdir()) if file.name != GGUF_INDEX)
    marks = {file.name: _mark(file) for file in files}
    (folder / RECORD).write_text(json.dumps(marks, indent=1) + "\n", encoding="utf-8")


def flaw(folder: Path) -> str | None:
    """What is wrong with a conversion, or None.

    Conversions of early versions have no record: their config, tokenizer and the headers of their
    weights must be whole.
    """
    try:
        marks = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        for name, mark in marks.items():
            if _mark(folder / name) != mark:
                return f"{name} is not as it was written"
    except FileNotFoundError as error:
        if error.filename != str(folder / RECORD):
            return f"{Path(error.filename).name} is missing"
        return _flaw_of_old(folder)
    except (AttributeError, OSError, TypeError, ValueError):
        return f"{RECORD} is not readable"
    return None


def _flaw_of_old(folder: Path) -> str | None:
    try:
        read_config(folder)
    except ModelError:
        return "config.json is not as it was written"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file() or not file.read_bytes().rstrip().endswith(b"}"):
            return f"{name} is missing or cut short"
    try:
        stored_weights(folder)
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        return "its weights are missing or cut short"
    return None


def _mark(file: Path) -> str:
    """A file's size, and a digest of its bytes or, if there are many, of samples."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    last = max(0, size - _SAMPLE_BYTES)
    with file.open("rb") as opened:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(opened.read())
        else:
            for sample in range(_SAMPLES):
                opened.seek(last * sample // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return f"{size}-{digest.hexdigest()[:16]}"
