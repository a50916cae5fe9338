"""What a measurement was made on."""

import os
import platform
from pathlib import Path

import torch
import transformers

import kvlite


def describe() -> dict[str, str]:
    """The processor and the versions that a figure belongs to."""
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
