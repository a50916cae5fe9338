"""What decides the rows of a run, so that a run is only ever gone on with as it was begun."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlite.bench.machine import describe
from kvlite.methods import parse_method
from kvlite.model.calibration import find_calibration
from kvlite.model.files import fingerprint


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
        "model": {
            "name": model,
            "files": fingerprint(folder),
            "calibration": _calibration(options, folder),
        },
        "machine": describe(),
    }


def _calibration(options: Mapping[str, Any], folder: Path) -> str:
    """A digest of what was measured of the model, where a method keeps other entries for it."""
    specs = [*options.get("methods", ()), *filter(None, [options.get("method")])]
    if not any(parse_method(spec).needs.calibration for spec in specs):
        return "unused"
    found = find_calibration(folder)
    text = "none" if found is None else json.dumps(found.to_json())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
