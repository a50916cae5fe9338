"""Which model a folder holds, whatever it is called."""

import hashlib
import json
from pathlib import Path

from kvlite.errors import ModelError
from kvlite.model.files import read_header

SAMPLES, SAMPLE_BYTES = 64, 4096


def fingerprint(folder: Path) -> str:
    """A model's weights in 16 digits: their names, types and shapes, and 64 samples of each file's
    bytes, so that a fine-tuned copy has another one.

    Raises:
        ModelError: a file of weights is damaged, gone, or cannot be read.
    """
    try:
        return _digest_of(folder)
    except OSError as error:
        why = error.strerror or str(error)
        raise ModelError(
            f"the model's files in {folder} cannot be read ({why}): put them back, or check their "
            "permissions"
        ) from error


def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    # `glob` finds nothing in a folder that it may not read, and says nothing.
    for path in sorted(each for each in folder.iterdir() if each.match("*.safetensors")):
        try:
            begin, stored = read_header(path)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"the model in {folder} cannot be loaded: {path.name} is damaged, get it again"
            ) from error
        tensors = sorted((name, each.kind, each.shape) for name, each in stored.items())
        digest.update(json.dumps(tensors).encode())
        last = max(0, path.stat().st_size - begin - SAMPLE_BYTES)
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(begin + last * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
