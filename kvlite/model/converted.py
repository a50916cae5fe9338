"""Checks that a converted model is as the conversion left it, without reading all of it."""

import hashlib
import json
from pathlib import Path

from kvlite.errors import ModelError
from kvlite.model.shape import read_config

RECORD = "kvlite.json"
_NEEDED = ("tokenizer.json", "tokenizer_config.json")
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14


def record(folder: Path) -> None:
    """Write sizes and digests of a conversion's files beside them."""
    marks = {file.name: _mark(file) for file in sorted(folder.iterdir())}
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
    for name in _NEEDED:
        file = folder / name
        if not file.is_file() or not file.read_bytes().rstrip().endswith(b"}"):
            return f"{name} is missing or cut short"
    from kvlite.model.files import stored_weights

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
