"""What computes on a device."""

from functools import cache
from importlib.util import find_spec

import torch

# Channels of a vector that kernels hold in registers and shared memory: of wider ones (latents)
# neither has room for what all query heads ask.
WIDEST = 256


# Rows from which on a CPU may multiply in bfloat16: a prompt's. An answer's tokens are fewer, also
# with proposed ones, or those of other answers, beside them.
MANY_ROWS = 64


@cache
def has_bfloat16() -> bool:
    """Whether a CPU's many rows are multiplied in bfloat16, by compiled loops: where it can, and is
    AMD's, which takes half as long. Intel's (Emerald Rapids) takes 1.2 to 1.8 times as long as in
    float32. What it is decides, not a measurement, so that a saved conversation goes on bit by
    bit."""
    capable = torch.cpu.get_capabilities().get("avx512_bf16", False)
    if not capable or not has_compiled(torch.device("cpu")):
        return False
    from llvmlite.binding import get_host_cpu_name

    return bool(get_host_cpu_name().startswith("znver"))


@cache
def has_compiled(device: torch.device) -> bool:
    """Whether loops that numba compiles run there."""
    return device.type == "cpu" and find_spec("numba") is not None


@cache
def has_triton(device: torch.device, dim: int = 0) -> bool:
    """Whether Triton's kernels run there, those over keys and values of `dim` channels if any;
    torch brings triton along on CUDA alone."""
    return device.type == "cuda" and dim <= WIDEST and find_spec("triton") is not None


def processors(device: torch.device) -> int:
    """Of a GPU, each of which runs several of a kernel's programs; a few where Triton interprets
    them on a CPU."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
