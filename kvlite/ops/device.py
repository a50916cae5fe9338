"""What computes on a device."""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run there; torch brings triton along on CUDA alone."""
    return device.type == "cuda" and find_spec("triton") is not None
