"""What decides the rows of a run, so that a run is only ever gone on with as it was begun."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlite.bench.machine import describe
from kvlite.model.calibration import find_calibration
from kvlite.model.fingerprint import fingerprint


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
        "model": {"name": model, "files": fingerprint(folder), "calibration": _calibrated(folder)},
        "machine": describe(),
    }


def _calibrated(folder: Path) -> str:
    """A digest of what was measured of the model, which decides what some methods keep."""
    found = find_calibration(folder)
    text = "none" if found is None else json.dumps(found.to_json())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
