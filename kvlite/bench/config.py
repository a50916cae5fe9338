"""What decides the rows of a run, so that a run is only ever gone on with as it was begun."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlite.bench.machine import describe

EDGE = 1 << 20


def configuration(
    command: str, options: Mapping[str, Any], model: str, folder: Path
) -> dict[str, Any]:
    """The command, its options, the model and its files, the machine and versions.

    Args:
        folder: of the model's safetensors.
    """
    return {
        "command": command,
        "options": dict(options),
        "model": {"name": model, "files": fingerprint(folder)},
        "machine": describe(),
    }


def fingerprint(folder: Path) -> str:
    """A digest of a model's config, tokenizer and weights: names, sizes, and the first and last
    MiB of each file, since reading all of them may take minutes."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE))
            file.seek(max(0, size - EDGE))
            digest.update(file.read(EDGE))
    return digest.hexdigest()[:16]
