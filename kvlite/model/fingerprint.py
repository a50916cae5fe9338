"""Which model a folder holds, whatever it is called."""

import hashlib
import json
from pathlib import Path

from kvlite.errors import ModelError

SAMPLES, SAMPLE_BYTES = 64, 4096
LONGEST_HEADER = 100_000_000


def fingerprint(folder: Path) -> str:
    """A model's weights in 16 digits: their names, types and shapes, and 64 samples of each file's
    bytes, so that a fine-tuned copy has another one.

    Raises:
        ModelError: a file of weights is damaged.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            begin, tensors = _header(path)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"the model in {folder} cannot be loaded: {path.name} is damaged, get it again"
            ) from error
        digest.update(json.dumps(tensors).encode())
        last = max(0, path.stat().st_size - begin - SAMPLE_BYTES)
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(begin + last * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _header(path: Path) -> tuple[int, list[tuple[str, str, list[int]]]]:
    """Where a file's data begins, and name, type and shape of each tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = [(name, about["dtype"], about["shape"]) for name, about in header.items()]
    return 8 + length, sorted(tensors)
