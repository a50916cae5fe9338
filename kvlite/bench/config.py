"""What decides the rows of a run, so that a run only goes on as it was begun."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import kvlite
from kvlite.methods import parse_method
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
        "model": {
            "name": model,
            "files": fingerprint(folder),
            "calibration": _calibration(options, folder),
        },
        "machine": _machine(),
    }


def _calibration(options: Mapping[str, Any], folder: Path) -> str:
    """A digest of the model's calibration, if a method uses it."""
    specs = [*options.get("methods", ()), *filter(None, [options.get("method")])]
    if not any(parse_method(spec).needs.calibration for spec in specs):
        return "unused"
    found = find_calibration(folder)
    text = "none" if found is None else json.dumps(found.to_json())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _machine() -> dict[str, str]:
    """The processor and the versions that a run was measured with."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvlite": kvlite.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
